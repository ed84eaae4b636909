"""What a rank has that other ranks must have too, and which ranks those are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from azureml_strategy.interfaces import ALL_RANKS, HasStages, SharesCopies
from azureml_strategy.lightning_internals import broadcasts_buffers
from azureml_strategy.strategies.equal_buffers import EqualBuffersStrategy
from azureml_strategy.strategies.replica_check.fingerprints import is_hashable

PARAMETER, BUFFER, OPTIMIZER, SCHEDULER = "parameter", "buffer", "optimizer", "scheduler"


class Copy(NamedTuple):
    """A value that some ranks must have alike.

    Attributes:
        kind: `PARAMETER` and so on.
        name: of the value.
        holders: ranks with the same holders must agree.
        value: a tensor of this rank, or a number, or several.
    """

    kind: str
    name: str
    holders: str
    value: Any


def copies_of(trainer: Trainer) -> list[Copy]:
    """Find what this rank must have like others, at this moment.

    Args:
        trainer: in training, between two steps.
    """
    return [*_of_module(trainer), *_of_optimizers(trainer), *_of_schedulers(trainer)]


def equalizes_buffers(strategy: Any) -> bool:
    """Whether a strategy makes buffers equal before they are used, so that those that a step changes may differ."""
    if isinstance(strategy, EqualBuffersStrategy):
        return strategy.keeps_buffers_equal
    return isinstance(strategy, DDPStrategy) and broadcasts_buffers(strategy)


def _of_module(trainer: Trainer) -> Iterator[Copy]:
    """Parameters, whether an optimizer has them or not, and buffers."""
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
        # Each rank's own on purpose: what DDP is told to leave alone, and DeepSpeed's experts.
        if name in ignored or getattr(tensor, "allreduce", True) is False:
            continue
        own, holders = tensor, shared
        if isinstance(tensor, DTensor):
            own, holders = tensor.to_local(), f"{shared}{_part(tensor)}"
        if is_hashable(own) and own.numel():
            yield Copy(kind, name, holders, own)


def _holders(strategy: Any) -> str | None:
    """The ranks that hold the same module as this one; None if nothing in it must be equal."""
    if isinstance(strategy, SharesCopies):
        return strategy.copies
    if isinstance(strategy, ModelParallelStrategy):  # stock: what is not cut may still be another on each rank
        return f"{ALL_RANKS} of tensor-parallel rank {strategy.device_mesh['tensor_parallel'].get_local_rank()}"
    return ALL_RANKS


def _part(tensor: DTensor) -> str:
    """Which part of a tensor this rank has. Ranks along an axis over which it is replicated have the same."""
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
        # How often it has stepped. Its other states follow from gradients, and so do the parameters.
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
    """A stage of a pipeline may have parameter groups of its own. Replicas of local SGD have the same ones."""
    return f"stage {strategy.pipeline_stage}" if isinstance(strategy, HasStages) else ALL_RANKS


def _is_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_numbers, value))
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.device.type == "cpu")
