"""Lists what a rank has that other ranks must have too, and hashes many tensors in a few kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parameter import is_lazy

from azureml_strategy.interfaces import ALL_RANKS, HasStages, SharesCopies
from azureml_strategy.lightning_internals import broadcasts_buffers
from azureml_strategy.strategies.equal_buffers import INTEGERS, EqualBuffersStrategy, place_weights

# About how many elements of all tensors together are read, and how many of each at least. They are spread over each.
_MOST_ELEMENTS, _FEWEST_ELEMENTS = 1 << 15, 32
PARAMETER, BUFFER, OPTIMIZER, SCHEDULER = "parameter", "buffer", "optimizer", "scheduler"


class Transfer:
    """Copies small tensors to the host while the device goes on."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Only CUDA has an event that tells when such a copy is there.
        self._copies = [each.to("cpu", non_blocking=each.is_cuda) for each in tensors]
        self._events: list[torch.cuda.Event] = []
        for device in {each.device for each in tensors if each.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def is_ready(self) -> bool:
        """Whether the device has made the copies."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def values(self) -> list[list[Any]]:
        """Return what the tensors hold, in their order. It waits for the device unless `is_ready`."""
        for event in self._events:
            event.synchronize()
        return [each.tolist() for each in self._copies]


class Fingerprints:
    """Hashes of some elements of each tensor, as `equal_buffers.fingerprint` computes them of all elements.

    The elements lie at equal distances. Where ranks drift apart, nearly all elements differ.

    Args:
        tensors: dense ones. They may change afterwards.
        turn: shifts the elements that are read; with another turn, others are.
    """

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor], turn: int = 0) -> None:
        self._count = len(tensors)
        most = max(_MOST_ELEMENTS // max(self._count, 1), _FEWEST_ELEMENTS)
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, tensor in enumerate(tensors):
            alike.setdefault((tensor.device, tensor.dtype), []).append(place)
        self._places = list(alike.values())
        self._hashes = Transfer(
            [_hashed([_sample(tensors[place], most, turn) for place in places]) for places in self._places]
        )

    def are_ready(self) -> bool:
        """Whether the device has computed them."""
        return self._hashes.is_ready()

    def values(self) -> list[int]:
        """Return the hashes, in the order of the tensors. It waits for the device unless `are_ready`."""
        found = [0] * self._count
        for places, hashes in zip(self._places, self._hashes.values(), strict=True):
            for place, value in zip(places, hashes, strict=True):
                found[place] = value
        return found


def is_hashable(tensor: Tensor) -> bool:
    """Whether the bits of a tensor can be read: a plain, dense one that has a memory."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return type(tensor) in (Tensor, nn.Parameter) or type(tensor.detach()) is Tensor


def _sample(tensor: Tensor, most: int, turn: int) -> Tensor:
    """Return some elements. Their number does not depend on the turn."""
    plain = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
    size = plain.numel()
    if size <= most and plain.dim() == 1:
        return plain
    step = max(-(-size // most), 1) | 1  # odd: an even one would see but some columns of most matrices
    count, first = size // step, turn % step
    if plain.is_contiguous():
        return plain.as_strided((count,), (step,), plain.storage_offset() + first)
    # flattening it would copy all of it
    places = torch.arange(first, first + count * step, step, device=plain.device)
    return plain[torch.unravel_index(places, plain.shape)]


def _hashed(samples: list[Tensor]) -> Tensor:
    """Return one hash for each sample. All samples have one type and lie on one device."""
    size = samples[0].itemsize
    if size == 1 or (size < 8 and not samples[0].is_floating_point()):
        samples = [each.view(INTEGERS[size]) for each in samples]  # not every device joins float8 and unsigned types
    bits = torch.cat(samples).view(INTEGERS[min(size, 4)])
    ends, weights = _places([len(each) * max(size // 4, 1) for each in samples], bits.device)
    # The sums are modulo 2^64, so that the difference of two of them is exactly what one sample adds.
    sums = functional.pad((bits * weights).cumsum(0), (1, 0))
    return sums[ends].diff()


def _places(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 0 and the end of each sample, and the weights of all their elements.

    The weights of a sample do not depend on its place: another rank may have other tensors before it.
    """
    weights = place_weights(device)
    if max(lengths) > len(weights):
        weights = weights.repeat(-(-max(lengths) // len(weights)))
    begun = {each: weights[:each] for each in set(lengths)}  # layers repeat, so that few lengths differ
    ends = torch.tensor([0, *itertools.accumulate(lengths)]).to(device, non_blocking=device.type == "cuda")
    return ends, torch.cat([begun[each] for each in lengths])


class Copy(NamedTuple):
    """A value that some ranks must have alike.

    Attributes:
        kind: `PARAMETER` and so on.
        name: of the value.
        holders: names the ranks that must agree; each of them gives the same name.
        value: a tensor of this rank, a number, or several numbers.
    """

    kind: str
    name: str
    holders: str
    value: Any


def copies_of(trainer: Trainer) -> list[Copy]:
    """Find what this rank must have like others at this moment, between two steps of the training."""
    return [*_of_module(trainer), *_of_optimizers(trainer), *_of_schedulers(trainer)]


def equalizes_buffers(strategy: Any) -> bool:
    """Whether a strategy makes buffers equal before they are used, so that they may differ after a step."""
    if isinstance(strategy, EqualBuffersStrategy):
        return strategy.keeps_buffers_equal
    return isinstance(strategy, DDPStrategy) and broadcasts_buffers(strategy)


def _of_module(trainer: Trainer) -> Iterator[Copy]:
    """List all parameters, with and without an optimizer, and the buffers."""
    module, shared = trainer.lightning_module, _holders(trainer.strategy)
    if shared is None:
        return
    cuts = isinstance(trainer.strategy, FSDPStrategy)  # FSDP1, whose parameters are parts of something flat
    named: list[tuple[str, str, Tensor]] = [] if cuts else [(PARAMETER, *each) for each in module.named_parameters()]
    named += [(BUFFER, *each) for each in module.named_buffers()]
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for kind, name, tensor in named:
        if is_lazy(tensor) or not _is_whole(tensor):
            continue
        # Each rank has its own on purpose: what DDP is told to leave alone, and DeepSpeed's experts.
        if name in ignored or getattr(tensor, "allreduce", True) is False:
            continue
        local, holders = tensor, shared
        if isinstance(tensor, DTensor):
            local, holders = tensor.to_local(), f"{shared}{_part(tensor)}"
        if is_hashable(local) and local.numel():
            yield Copy(kind, name, holders, local)


def _holders(strategy: Any) -> str | None:
    """Name the ranks that hold the same module as this one; None if nothing in it must be equal."""
    if isinstance(strategy, SharesCopies):
        return strategy.copies
    if isinstance(strategy, ModelParallelStrategy):  # Lightning's: what is not cut may still differ between ranks
        return f"{ALL_RANKS} of tensor-parallel rank {strategy.device_mesh['tensor_parallel'].get_local_rank()}"
    return ALL_RANKS


def _part(tensor: DTensor) -> str:
    """Name the part of a tensor that this rank has. Ranks along an axis that replicates it have the same part."""
    placed = enumerate(zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=False))
    return "".join(f", part {place} of axis {axis}" for axis, (how, place) in placed if not how.is_replicate())


def _is_whole(tensor: Any) -> bool:
    """Whether ZeRO-3 keeps this parameter whole on every rank, as it does with small ones; True without ZeRO-3."""
    if not hasattr(tensor, "ds_status"):
        return True
    return bool(tensor.ds_persist) and tensor.ds_status.name == "AVAILABLE" and tensor.numel() == tensor.ds_numel


def _of_optimizers(trainer: Trainer) -> Iterator[Copy]:
    holders = _holders_of_numbers(trainer.strategy)
    for number, optimizer in enumerate(trainer.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and (isinstance(value, Tensor) or _is_numbers(value)):
                    yield Copy(OPTIMIZER, f"{key} of group {index} of optimizer {number}", holders, value)
        if isinstance(trainer.strategy, SharesCopies) and trainer.strategy.copies != ALL_RANKS:
            continue
        # Only the number of steps is compared. The other states follow from the gradients, as the parameters do.
        states = [state for state in optimizer.state.values() if isinstance(state, dict) and "step" in state]
        steps = [state["step"] for state in states]
        if steps and all(each.is_cpu for each in steps if isinstance(each, Tensor)):
            yield Copy(OPTIMIZER, f"steps of optimizer {number}", holders, sorted(set(map(float, steps))))


def _of_schedulers(trainer: Trainer) -> Iterator[Copy]:
    holders = _holders_of_numbers(trainer.strategy)
    for number, config in enumerate(trainer.lr_scheduler_configs):
        name = f"{type(config.scheduler).__name__} {number}"
        for key, value in vars(config.scheduler).items():
            if _is_numbers(value):
                yield Copy(SCHEDULER, f"{key} of {name}", holders, value)


def _holders_of_numbers(strategy: Any) -> str:
    """Name the ranks that have the same parameter groups. Each stage of a pipeline may have its own."""
    return f"stage {strategy.pipeline_stage}" if isinstance(strategy, HasStages) else ALL_RANKS


def _is_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_numbers, value))
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.device.type == "cpu")
