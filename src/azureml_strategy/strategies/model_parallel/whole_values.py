"""Whole tensors beside shards: dictionaries of weights, copies in callbacks, layers that are added later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from azureml_strategy.strategies.changing_parameters import for_each_parameter
from azureml_strategy.strategies.errors import ConfigurationError


def take_whole_dictionaries(module: nn.Module) -> None:
    """Let `load_state_dict` accept whole tensors, from a file or another module, as on one process.

    Each rank takes its part of them, without messages between the ranks.
    """
    for each in module.modules():
        if any(isinstance(parameter, DTensor) for parameter in each.parameters(recurse=False)):
            each.register_load_state_dict_pre_hook(_shard_values)  # type: ignore[no-untyped-call]


def _shard_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:
            value = value.to(parameter.device)
            mesh, placements = parameter.device_mesh, parameter.placements
            state_dict[prefix + name] = distribute_tensor(value, mesh, placements, src_data_rank=None)


def gather_apart(checkpoint: dict[str, Any], written_by_shards: Iterable[str]) -> dict[str, Any]:
    """Return a checkpoint in which the entries that rank 0 writes alone are whole. Every rank must call this.

    A callback's averages of weights are shards, for example, and rank 0 would write only its own. Each rank writes its
    part of the entries `written_by_shards`.
    """
    shards = {name: checkpoint[name] for name in written_by_shards if name in checkpoint}
    rest = {name: value for name, value in checkpoint.items() if name not in shards}
    whole = apply_to_collection(rest, DTensor, lambda tensor: tensor.full_tensor().cpu(), allow_frozen=True)
    return {**whole, **shards}


def copies_in(callbacks: Iterable[Callback], module: LightningModule) -> list[LightningModule]:
    """List the copies of a module that callbacks have made in `setup`, as callbacks that average weights do."""
    held = (value for callback in callbacks for value in vars(callback).values() if isinstance(value, nn.Module))
    copies = (each for value in held for each in value.modules() if type(each) is type(module) and each is not module)
    return list(dict.fromkeys(copies))


def train_alike(optimizer: Optimizer) -> None:
    """Keep those parameters of an optimizer that are not sharded equal on all ranks, also parameters of later groups.

    FSDP2 does not know of a layer that is made after the start, or outside of the module. Each rank gets the first
    rank's values, and the mean of the gradients of all.

    Raises:
        ConfigurationError: a parameter group holds sharded and other parameters, which torch's optimizers cannot step.
    """

    def share(parameter: nn.Parameter) -> None:
        dist.broadcast(parameter.detach(), 0)
        parameter.register_hook(mean)  # type: ignore[no-untyped-call]

    def mean(gradient: Tensor) -> Tensor:
        total = gradient / dist.get_world_size()
        dist.all_reduce(total)
        return total

    for_each_parameter(optimizer, _unsharded, share)


def _unsharded(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for param_group in optimizer.param_groups:
        whole = [each for each in param_group["params"] if not isinstance(each, DTensor)]
        if whole and len(whole) < len(param_group["params"]):
            shapes = ", ".join(str(tuple(each.shape)) for each in whole[:3])
            raise ConfigurationError(
                f"A parameter group of {type(optimizer).__name__} holds parameters of the module, which are sharded, "
                f"and others of the shapes {shapes}, which are not part of it. torch has no step for both at once. "
                "Make the layer in __init__ or configure_model and keep it as an attribute of the module, or give it a "
                "parameter group of its own."
            )
        yield from whole
