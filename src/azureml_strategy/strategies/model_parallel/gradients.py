"""Makes the ranks of a tensor-parallel group agree on the gradients of what none of them has cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class SharedGradients:
    """Parameters of which all ranks of a tensor-parallel group hold the same part.

    Attributes:
        copied: each rank computes the whole gradient.
        summed: each rank computes the part of its own heads, as of a normalisation inside of attention.
    """

    copied: list[nn.Parameter] = field(default_factory=list)
    summed: list[nn.Parameter] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module, summed_layers: Sequence[str]) -> Self:
        """Find them in a module that was cut along the axis `tensor_parallel`.

        Args:
            module: the module.
            summed_layers: names of the layers whose gradients are to be summed.
        """
        summed = [each for name in summed_layers for each in module.get_submodule(name).parameters(recurse=False)]
        known = set(summed)
        uncut = uncut_parameters(module, "tensor_parallel")
        return cls([each for each in uncut if each not in known], summed)

    def agree(self, group: ProcessGroup) -> None:
        """Give each rank of the group the same gradients, after the last backward pass of a step."""
        copy_gradients(self.copied, group)
        for gradient in _local_gradients(self.summed):
            dist.all_reduce(gradient, group=group)


def uncut_parameters(module: nn.Module, axis: str) -> list[nn.Parameter]:
    """List the parameters of which all ranks along an axis of the mesh hold the same part."""
    return [parameter for parameter in module.parameters() if not _is_cut(parameter, axis)]


def copy_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Give each rank of the group the first rank's gradients of parameters that all of them hold.

    The gradients differ only in their last bits, which depend on where a kernel's buffers lie in memory, or on its
    atomic additions. But the copies of a parameter would drift apart step by step, and a checkpoint holds one of them.
    """
    source = dist.get_global_rank(group, 0)
    local = _local_gradients(parameters)
    for work in [dist.broadcast(gradient, source, group=group, async_op=True) for gradient in local]:
        assert work is not None
        work.wait()


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def _is_cut(parameter: nn.Parameter, axis: str) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    return axis in names and not parameter.placements[names.index(axis)].is_replicate()
