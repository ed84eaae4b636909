"""Makes the ranks of a tensor-parallel group agree on the gradients of what none of them has cut."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


class SumsGradients:
    """Hook before the forward pass of a layer that is whole on each rank, but sees this rank's heads only.

    Each rank computes a part of the gradients. They are summed in the backward pass itself, before anything is added to
    them, so that accumulation, several backward passes and manual optimization need no care.

    Args:
        group: the tensor-parallel group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._hooked: dict[str, Tensor] = {}

    def __call__(self, layer: nn.Module, inputs: object) -> None:
        """Hook the parameters as they are in this forward pass: FSDP2 puts whole ones in the place of shards."""
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.requires_grad and self._hooked.get(name) is not parameter:
                parameter.register_hook(self._summed)  # type: ignore[no-untyped-call]
                self._hooked[name] = parameter

    def _summed(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=self._group)
        return total


def uncut_parameters(module: nn.Module, axis: str) -> list[nn.Parameter]:
    """List the parameters of which all ranks along an axis of the mesh hold the same part."""
    return [parameter for parameter in module.parameters() if not _is_cut(parameter, axis)]


def copy_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Give each rank of the group the first rank's gradients of parameters that all of them hold.

    The gradients differ only in their last bits, which depend on where a kernel's buffers lie in memory, or on its
    atomic additions. But the copies of a parameter would drift apart step by step, and a checkpoint holds one of them.
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
