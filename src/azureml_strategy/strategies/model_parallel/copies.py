"""What several ranks hold alike: initial parameters, batches, and gradients of what is not cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


def copy_from_rank_zero(module: nn.Module, device: torch.device) -> None:
    """Give every rank the parameters and buffers of rank 0, as DDP does, one tensor at a time on the device.

    Without it each rank would contribute the shards of its own initial values. Tensors on the meta device have no
    values yet and are left alone.
    """
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if not tensor.is_meta:
            values = tensor.detach().to(device)
            dist.broadcast(values, src=0)
            tensor.detach().copy_(values)


def copy_batch(batch: Any, group: ProcessGroup) -> Any:
    """Each tensor of a batch as the first rank of the group has it.

    The ranks read the same samples, but what a worker of a data loader or a hook draws at random differs: Lightning
    seeds each rank's workers by its global rank. Ranks that compute parts of one layer would mix different inputs.

    Args:
        batch: tensors on the device, nested at will, of the same shapes on each rank.
        group: the tensor-parallel group.
    """
    source = dist.get_global_rank(group, 0)

    def copied(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, source, group=group)
        return tensor

    return apply_to_collection(batch, Tensor, copied)


def uncut_parameters(module: nn.Module, axis: str) -> list[nn.Parameter]:
    """The parameters of which each rank along an axis of the mesh holds the same part."""
    return [parameter for parameter in module.parameters() if not _is_cut(parameter, axis)]


def copy_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Give each rank of the group the first one's gradients of parameters that all of them have.

    They are equal but for their last bits, which depend on where a kernel's buffers lie in memory, or on its atomic
    additions. The copies would drift apart step by step, and a checkpoint holds one of them.
    """
    source = dist.get_global_rank(group, 0)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    for work in [dist.broadcast(gradient, source, group=group, async_op=True) for gradient in local]:
        assert work is not None
        work.wait()


def _is_cut(parameter: nn.Parameter, axis: str) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    return axis in names and not parameter.placements[names.index(axis)].is_replicate()
