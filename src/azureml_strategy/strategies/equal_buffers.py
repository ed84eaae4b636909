"""Keeps the buffers of ranks equal, as DDP does: they become those of the first rank."""

from __future__ import annotations

from collections import defaultdict
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
from azureml_strategy.strategies.mixed_precision import NORMS_WITH_STATISTICS

# After so many steps the ranks have told one another which buffers the training changes.
_OBSERVED_STEPS = 2


# The module that has a buffer, and the buffer's name in it.
Place = tuple[nn.Module, str]


class EqualBuffers:
    """Gives all ranks of a group the buffers of the first. DeepSpeed and FSDP2 leave to each rank its own.

    DDP sends all buffers before each forward pass. Here only those are sent that change, so that tables of constants
    cost nothing. The running statistics of normalisations are sent before they are used: in training they are only
    written, and the first rank's are the same whether the others get them or not. A buffer that the training changes
    and may read, such as a moving codebook, is sent before each step. Which these are is seen by their versions, and
    agreed on by all ranks, as they must all send the same ones.

    Every method is a collective. One rank alone sends nothing.

    Args:
        module: whose buffers they are. Buffers that are sharded themselves are left alone.
        group: of the ranks; None is all of them.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None) -> None:
        self._group, self._alone = group, dist.get_world_size(group) == 1
        self._statistics: list[Place] = []
        self._others: list[Place] = []
        for owner in module.modules():
            kind = self._statistics if isinstance(owner, NORMS_WITH_STATISTICS) else self._others
            kind += [(owner, name) for name, buffer in owner.named_buffers(recurse=False) if _is_whole(buffer)]
        self._changing: list[Place] = []
        self._versions = {place: _version(place) for place in self._others}
        self._steps = 0

    def begin(self) -> None:
        """Make all buffers equal, before the first step."""
        for place in self._statistics + self._others:
            self._send([place])  # one by one: tables may be large

    def before_step(self) -> None:
        """Make those equal that a training step changes and may read; after a step that updated the parameters."""
        if self._steps in range(1, _OBSERVED_STEPS + 1):
            self._observe()
        self._steps += 1
        self._send(self._changing)

    def before_use(self) -> None:
        """Make those equal that the training has changed: before an evaluation, and before they are saved."""
        self._observe()
        self._send(self._statistics + self._changing)

    def _observe(self) -> None:
        """Agree with the other ranks on which buffers have changed on any of them."""
        constant = [place for place in self._others if place not in self._changing]
        if self._alone or not constant:
            return
        device = next(buffer.device for buffer in map(_buffer, self._others) if buffer is not None)
        changed = torch.tensor([_version(place) != self._versions[place] for place in constant], device=device).int()
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._group)
        self._changing += [place for place, seen in zip(constant, changed.tolist(), strict=True) if seen]

    def _send(self, places: list[Place]) -> None:
        if self._alone:
            return
        alike: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for buffer in [each for each in map(_buffer, places) if each is not None]:
            alike[buffer.dtype, buffer.device].append(buffer)
        for tensors in alike.values():
            _send_together(tensors, self._group)
        self._versions.update((place, _version(place)) for place in places)


class EqualBuffersStrategy(ParallelStrategy):
    """Mix-in before a strategy of Lightning's that leaves to each rank its own buffers."""

    _buffers: EqualBuffers | None = None
    _updated = False

    def keep_buffers_equal(self, module: nn.Module, group: ProcessGroup | None = None) -> None:
        """Keep them equal from now on, until `teardown`. Every rank of the group must call this.

        Args:
            module: see `EqualBuffers`.
            group: see `EqualBuffers`.
        """
        self._buffers, self._updated = EqualBuffers(module, group), True
        self._buffers.begin()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.equal_before_step()
        return super().training_step(*args, **kwargs)

    def equal_before_step(self) -> None:
        """Before each `training_step` that follows an update of the parameters, as DDP does."""
        assert self.lightning_module is not None
        if self._buffers is not None and self._updated:
            self._buffers.before_step()
        self._updated = not accumulates(self.lightning_module.trainer)

    def equal_before_use(self) -> None:
        """Before an evaluation and before a checkpoint. A strategy with a `stage_checkpoint` calls this there."""
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
        self.equal_before_use()  # the state dict in the checkpoint has these tensors, not copies
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def teardown(self) -> None:
        self._buffers = None
        super().teardown()


def equal_in_forward(module: nn.Module, buffers: EqualBuffers) -> None:
    """Keep buffers equal around a loop of the user's: before each training pass, and before the first evaluation after.

    As under DDP, all ranks must call the module alike. A collective at once.

    Args:
        module: what Fabric calls.
        buffers: of this module.
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
    module.register_forward_pre_hook(before_forward)


def _send_together(tensors: list[Tensor], group: ProcessGroup | None) -> None:
    together = torch.cat([each.detach().reshape(-1) for each in tensors])
    dist.broadcast(together.view(torch.uint8), group=group, group_src=0)  # as bytes: gloo knows no complex numbers
    if dist.get_rank(group) > 0:
        with torch.no_grad():
            sizes = [each.numel() for each in tensors]
            for tensor, values in zip(tensors, torch.split(together, sizes), strict=True):
                tensor.copy_(values.view_as(tensor))


def _is_whole(buffer: Tensor) -> bool:
    return not isinstance(buffer, DTensor) and not buffer.is_meta and buffer.layout == torch.strided


def _buffer(place: Place) -> Tensor | None:
    """Return the buffer that is there now: a step may have put another in its place, or None."""
    owner, name = place
    return owner._buffers.get(name)


def _version(place: Place) -> tuple[int, int]:
    """What changes with each change of a buffer, in place or by another tensor. Tensors of inference mode tell none."""
    buffer = _buffer(place)
    return id(buffer), -1 if buffer is None or buffer.is_inference() else buffer._version
