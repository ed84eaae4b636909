"""Clips the norm of gradients that are spread over ranks in different ways."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate


def clip_gradient_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip gradients that are spread in different ways, which `torch.nn.utils.clip_grad_norm_` refuses.

    Layers of a tensor-parallel plan are spread over both axes, all others over the data-parallel axis only. A gradient
    that is not spread is a copy on each rank. Every number counts once. One all-reduce gives all ranks the same norm,
    to the last bit. torch reduces once per axis, so its norms may differ between ranks. Then copies of a parameter
    would differ too.

    Args:
        parameters: the same on all ranks; their gradients are scaled in place.
        max_norm: the largest 2-norm that all gradients together may have.

    Returns:
        The norm before clipping.
    """
    groups: defaultdict[tuple[DeviceMesh | None, int], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups[mesh_of(parameter.grad), _copies(parameter.grad)].append(parameter)
    if not groups:
        return torch.zeros(())
    squares = torch.stack([_norm(group).square() / copies for (_, copies), group in groups.items()]).sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def mesh_of(gradient: Tensor) -> DeviceMesh | None:
    """Return the mesh that a gradient is spread over; None for a plain tensor."""
    return gradient.device_mesh if isinstance(gradient, DTensor) else None


def _copies(gradient: Tensor) -> int:
    """Return how many ranks hold the same part of a gradient."""
    world_size = dist.get_world_size()
    if not isinstance(gradient, DTensor):
        return world_size
    axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return world_size // math.prod(size for size, placement in axes if not _is_copied(placement))


def _is_copied(placement: Placement) -> bool:
    # `_norm` completes a partial sum, so that all ranks have the same
    return placement.is_replicate() or placement.is_partial()


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of this rank's parts, in float32 at least: in float16 it may overflow."""
    parts = [local_part(parameter.grad) for parameter in parameters]
    norms = [torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in parts]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def local_part(gradient: Tensor | None) -> Tensor:
    """Return this rank's part of a gradient, with partial sums completed."""
    if not isinstance(gradient, DTensor):
        assert gradient is not None
        return gradient
    if any(placement.is_partial() for placement in gradient.placements):
        summed = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        gradient = gradient.redistribute(placements=summed)
    return gradient.to_local()
