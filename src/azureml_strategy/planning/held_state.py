"""What a rank holds of a training: the bytes of parameters, gradients, optimizer states and buffers, by their memory.

It is counted where torch keeps numbers, in storages, each once: views, flattened copies and shards count as the memory
that they take. So padding counts, too, which ZeRO and FSDP2 add to make parts equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.gradient_parts import gradients_of

Storages = dict[int, int]
"""The bytes of storages, by their addresses."""


@dataclass(frozen=True)
class HeldState:
    """Bytes that one rank holds of a training.

    Attributes:
        parameters: what its modules compute with, whole or in parts.
        gradients: after the last backward pass of a step, before the optimizer's.
        optimizer: states and copies of parameters that the optimizer keeps, after its first step.
        buffers: of the modules, such as running statistics.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """All of them, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def gradient_bytes(module: nn.Module) -> int:
    """Return the bytes of the gradients that this rank holds between the backward pass and the optimizer's step."""
    held = [each.grad for each in module.parameters() if each.grad is not None]
    try:
        parts = [each.part() for each in gradients_of(module)]
    except ConfigurationError:  # DeepSpeed has averaged none yet
        parts = []
    return sum(_storages([*held, *(part for part in parts if part is not None)]).values())


def held_state(trainer: Trainer, gradients: int) -> HeldState:
    """Return what this rank holds after an optimizer step.

    Args:
        trainer: in `on_train_batch_end`.
        gradients: from `gradient_bytes`, before that step.
    """
    module = trainer.lightning_module
    parameters = _storages(_parameter_tensors(module))
    buffers = _without(_storages(module.buffers()), parameters)
    optimizers = _storages(each for one in trainer.optimizers for each in _optimizer_tensors(one))
    kept = _without(optimizers, parameters)
    return HeldState(sum(parameters.values()), gradients, sum(kept.values()), sum(buffers.values()))


def _parameter_tensors(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module.parameters():
        yield parameter
        shard = getattr(parameter, "ds_tensor", None)  # under ZeRO stage 3 the parameter itself is empty
        if shard is not None:
            yield shard


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yield all tensors of an optimizer, or of that which DeepSpeed has wrapped."""
    while hasattr(optimizer, "optimizer") and not isinstance(optimizer, Optimizer):
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            yield from (each for each in getattr(optimizer, name, ()) if isinstance(each, Tensor))
        optimizer = optimizer.optimizer
    for group in optimizer.param_groups:
        yield from group["params"]
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor):
            yield parameter
        yield from (each for each in state.values() if isinstance(each, Tensor))


def _storages(tensors: Iterable[Tensor]) -> Storages:
    found: Storages = {}
    for each in tensors:
        storage = (each.to_local() if isinstance(each, DTensor) else each).untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _without(storages: Storages, others: Storages) -> Storages:
    return {address: size for address, size in storages.items() if address not in others}
