"""Keeps buffers equal on all ranks, as DDP does: they become those of the first rank."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from typing_extensions import override

from azureml_strategy.lightning_internals import accumulates
from azureml_strategy.strategies.mixed_precision import NORM_WITH_STATISTICS

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class EqualBuffers:
    """Gives all ranks of a group the buffers of the first. DeepSpeed and FSDP2 leave to each rank its own.

    DDP sends all buffers before each forward pass. Here only buffers that change are sent, so that tables of constants
    cost nothing. The running statistics of normalisations are sent before an evaluation or a checkpoint: training only
    writes them, and the first rank's do not depend on the others'. A buffer that the training changes and may read,
    such as a moving codebook, is sent before each step. The ranks look for such buffers together, by hashes, before an
    evaluation or a checkpoint and at steps 1, 2, 4, 8 and so on. A buffer that changes later is sent from then on.

    Every method is a collective. A single rank sends nothing. A buffer whose shape differs between ranks, such as a
    table that grows with the batches that a rank reads, is left as it is.

    Args:
        module: its sharded buffers are left alone.
        device: of this rank; some buffers may be elsewhere.
        group: of the ranks; None is all of them.
    """

    def __init__(self, module: nn.Module, device: torch.device, group: ProcessGroup | None = None) -> None:
        self._device, self._group, self._alone = device, group, dist.get_world_size(group) == 1
        found = [
            _Buffer(owner, name)
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if not isinstance(buffer, DTensor) and not buffer.is_meta and buffer.layout == torch.strided
        ]
        self._statistics = [each for each in found if isinstance(each.owner, NORM_WITH_STATISTICS)]
        self._others = [each for each in found if not isinstance(each.owner, NORM_WITH_STATISTICS)]
        self._changing: list[_Buffer] = []
        self._before: Tensor | None = None
        self._steps = 0

    def begin(self) -> None:
        """Make all buffers equal, before the first step."""
        everything = self._statistics + self._others
        if self._alone or not everything:
            return
        self._agree(everything, torch.zeros(len(everything), dtype=torch.int64, device=self._device))
        for each in everything:
            self._send([each])  # one by one: tables may be large

    def before_step(self) -> None:
        """Send the buffers that a training step changes and may read; before a step that follows an update."""
        if self._steps & (self._steps - 1) == 0:  # 0, when nothing is known yet, and the powers of two
            self._observe()
        self._steps += 1
        self._send(self._changing)

    def before_use(self) -> None:
        """Send the buffers that the training has changed: before an evaluation, and before they are saved."""
        if self._steps > 0:  # values that a resume restores are no change
            self._observe()
        self._send(self._statistics + self._changing)

    def _observe(self) -> None:
        """Agree with the other ranks on which buffers have changed on any of them."""
        if self._alone or not self._others:
            return
        before, self._before = self._before, torch.stack([each.summary(self._device) for each in self._others])
        if before is not None:
            self._changing = self._agree(self._others, (self._before != before).long())

    def _agree(self, buffers: Sequence[_Buffer], changed: Tensor) -> list[_Buffer]:
        """Find out which buffers have the same form on all ranks, and return those that have changed on any of them."""
        forms = torch.tensor([each.note_form() for each in buffers], device=self._device)
        reduced = torch.stack([forms, -forms, changed])
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self._group)
        found = list(zip(buffers, *reduced.tolist(), strict=True))
        for each, most, least, _ in found:
            each.alike = most == -least
        return [each for each, _, _, has_changed in found if has_changed or each in self._changing]

    def _send(self, buffers: Sequence[_Buffer]) -> None:
        """Send the first rank's values. All ranks send equally many bytes, even if one has another form since."""
        sent = [each for each in buffers if each.alike]
        if self._alone or not sent:
            return
        valid = torch.tensor([each.has_form() for each in sent], dtype=torch.uint8)
        together = torch.cat([valid.to(self._device), *(each.to_bytes(self._device) for each in sent)])
        dist.broadcast(together, group=self._group, group_src=0)
        if dist.get_rank(self._group) > 0:
            valid, *values = torch.split(together, [len(sent), *(each.size for each in sent)])
            for each, known, value in zip(sent, valid.tolist(), values, strict=True):
                if known and each.has_form():
                    each.set(value)


class _Buffer:
    """One buffer of a module; a step may put another tensor in its place."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner, self._name = owner, name
        self.alike = False  # whether all ranks have the form that was noted
        self._form: tuple[torch.Size, torch.dtype] | None = None
        self.size = 0  # in bytes

    def note_form(self) -> int:
        """Note shape and type, which `to_bytes` uses until the next call, and return a hash of them."""
        tensor = self.owner._buffers.get(self._name)
        self._form = None if tensor is None else (tensor.shape, tensor.dtype)
        self.size = 0 if tensor is None else tensor.nbytes
        return zlib.crc32(repr(self._form).encode())

    def has_form(self) -> bool:
        """Whether the buffer still has the shape and type that were noted."""
        tensor = self.owner._buffers.get(self._name)
        return tensor is not None and (tensor.shape, tensor.dtype) == self._form

    def to_bytes(self, device: torch.device) -> Tensor:
        """Return the values as bytes; zeros if there is no buffer of that form."""
        tensor = self.owner._buffers.get(self._name)
        if tensor is None or not self.has_form():
            return torch.zeros(self.size, dtype=torch.uint8, device=device)
        return _flat(tensor).view(torch.uint8).to(device)

    def set(self, values: Tensor) -> None:
        """Set the values to the bytes of another rank's `to_bytes`."""
        tensor = self.owner._buffers[self._name]
        assert tensor is not None
        assert self._form is not None
        shape, dtype = self._form
        new = values.clone().view(dtype).view(shape)  # a part of the sent bytes may start at an odd one
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            self.owner._buffers[self._name] = new.to(tensor.device)
        else:
            with torch.no_grad():
                tensor.copy_(new)

    def summary(self, device: torch.device) -> Tensor:
        """Return a hash of the values, int64 of shape `()`. torch's version counter would miss what `.data` changes."""
        tensor = self.owner._buffers.get(self._name)
        if tensor is None:
            return torch.zeros((), dtype=torch.int64, device=device)
        return fingerprint(tensor).to(device)


class EqualBuffersStrategy(ParallelStrategy):
    """Mix-in before a strategy of Lightning's that leaves each rank its own buffers."""

    _buffers: EqualBuffers | None = None
    _updated = False

    @property
    def keeps_buffers_equal(self) -> bool:
        """Whether `keep_buffers_equal` is in effect."""
        return self._buffers is not None

    def keep_buffers_equal(self, module: nn.Module, group: ProcessGroup | None = None) -> None:
        """Keep a module's buffers equal until `teardown`, see `EqualBuffers`. A collective of the group."""
        self._buffers, self._updated = EqualBuffers(module, self.root_device, group), True
        self._buffers.begin()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.equal_before_step()
        return super().training_step(*args, **kwargs)

    def equal_before_step(self) -> None:
        """Send changed buffers before each `training_step` that follows an update of the parameters, as DDP does."""
        assert self.lightning_module is not None
        if self._buffers is not None and self._updated:
            self._buffers.before_step()
        self._updated = not accumulates(self.lightning_module.trainer)

    def equal_before_use(self) -> None:
        """Send changed buffers before an evaluation or a checkpoint. `stage_checkpoint` must call this too."""
        if self._buffers is not None:
            self._buffers.before_use()

    @override
    def on_validation_start(self) -> None:
        self.equal_before_use()
        super().on_validation_start()

    @override
    def on_test_start(self) -> None:
        self.equal_before_use()
        super().on_test_start()

    @override
    def on_predict_start(self) -> None:
        self.equal_before_use()
        super().on_predict_start()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        self.equal_before_use()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def teardown(self) -> None:
        self._buffers = None
        super().teardown()


def equal_in_forward(called: nn.Module, module: nn.Module, buffers: EqualBuffers) -> None:
    """Keep buffers equal in a user's loop: before each training pass, and before the first evaluation after one.

    As under DDP, all ranks must call the module alike. This call is a collective, too.

    Args:
        called: the module that Fabric calls. DeepSpeed's engine is always in training mode itself.
        module: the same, or a module inside of it.
        buffers: of `module`.
    """
    trained = False

    def before_forward(_: nn.Module, __: Any) -> None:
        nonlocal trained
        if module.training:
            buffers.before_step()
        elif trained:
            buffers.before_use()
        trained = module.training

    buffers.begin()
    called.register_forward_pre_hook(before_forward)


def fingerprint(tensor: Tensor) -> Tensor:
    """Hash the bits of a dense tensor on its device, without a synchronisation; an int64 of shape `()`.

    Each element, read as an integer of up to 32 bits, is multiplied by an odd number of its place, and the products are
    added modulo 2^64. So the change of one element always changes the hash. A change of several, or of their order, is
    missed once in 2^40 times or more rarely: the lowest bits of round numbers are zeros, 23 in float32, and so are
    those of the products. Sums and norms of values would miss a change of order, and any change beside a NaN or an
    infinity.
    """
    flat, weights = _flat(tensor), place_weights(tensor.device)
    bits = flat.view(INTEGERS[min(flat.itemsize, 4)])
    sums = torch.stack([(part * weights[: len(part)]).sum() for part in torch.split(bits, len(weights))])
    return sums[0] if len(sums) == 1 else fingerprint(sums)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


@cache
def place_weights(device: torch.device) -> Tensor:
    """Return as many odd numbers as elements are hashed together, the same on all ranks."""
    drawn = torch.randint(-(1 << 62), 1 << 62, (1 << 16,), generator=torch.Generator().manual_seed(0), device="cpu")
    return (drawn * 2 + 1).to(device)
