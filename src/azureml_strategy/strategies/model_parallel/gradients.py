"""Gradients that are spread over device meshes: sums and copies in a tensor-parallel group, norms, and lost hooks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from azureml_strategy.strategies.model_parallel.clipping import local_part, mesh_of

_NORMS = (Tensor.norm, torch.norm, torch.linalg.vector_norm)
_DEFAULTS = ("fro", None)


class SumsGradients:
    """Hook before the forward pass of a layer that is whole on each rank, but computes with this rank's heads only.

    Each rank computes a part of the gradients. They are summed in the backward pass itself, before they are added to
    earlier ones. So accumulation, several backward passes and manual optimization work without further code.

    Args:
        group: the tensor-parallel group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._hooked: dict[str, Tensor] = {}

    def __call__(self, layer: nn.Module, inputs: object) -> None:
        """Hook the parameters as they are in this forward pass, where FSDP2 has put whole ones in place of shards."""
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
    atomic additions. But the copies of a parameter would drift apart, and a checkpoint holds only one of them.
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


class NormsOverMeshes(TorchFunctionMode):
    """While it is active, the norm of a DTensor is a plain number, and torch's clipping takes any mix of meshes.

    Lightning's `grad_norm` makes a tensor of the norms, and `torch.nn.utils.clip_grad_norm_` stacks them. torch does
    neither with DTensors of two meshes, and cut layers have another mesh than the rest. It has no maximum of an empty
    part either. All ranks must take the same norms: each is a collective.
    """

    @override
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS or func is torch._foreach_norm:
            p = _order(args, kwargs)
            if p is not None and func in _NORMS and isinstance(args[0], DTensor):
                return _norm(args[0], p)
            if p is not None and func is torch._foreach_norm and any(isinstance(each, DTensor) for each in args[0]):
                return [_norm(each, p) for each in args[0]]
        if func is not torch._foreach_mul_ or len({mesh_of(each) for each in args[0]}) <= 1:
            return func(*args, **kwargs)
        # Multiply the tensors of each mesh by themselves, in place; all have one factor.
        by_mesh: defaultdict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
        for tensor in args[0]:
            by_mesh[mesh_of(tensor)].append(tensor)
        for tensors in by_mesh.values():
            func(tensors, *args[1:], **kwargs)
        return None


def warn_of_lost_hooks(module: nn.Module) -> None:
    """Warn of hooks on parameters before a module is sharded: FSDP2 computes with other tensors in their place."""
    lost = [
        name for name, each in module.named_parameters() if each._backward_hooks or each._post_accumulate_grad_hooks
    ]
    if lost:
        rank_zero_warn(
            f"{', '.join(lost)} has a hook of register_hook() or register_post_accumulate_grad_hook(), which is never "
            "called here: FSDP2 computes with other tensors in the parameters' place. Change gradients by "
            "edit_gradients of azureml_strategy.gradients in on_before_optimizer_step()."
        )


def _order(args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """Return p of a norm over all numbers; None for another kind of norm."""
    given = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2))
    p = 2 if given in _DEFAULTS else given
    whole = len(args) <= 2 and kwargs.get("dim") is None and not kwargs.get("keepdim")
    return float(p) if whole and isinstance(p, int | float) and p > 0 else None


def _norm(tensor: Tensor, p: float) -> Tensor:
    """Return the p-norm of a tensor whose parts are on several ranks, in float32 at least."""
    part = local_part(tensor)
    precise = torch.promote_types(part.dtype, torch.float32)
    norm = torch.linalg.vector_norm(part, p, dtype=precise) if part.numel() else part.new_zeros((), dtype=precise)
    if not isinstance(tensor, DTensor):
        return norm
    power = norm if p == math.inf else norm.pow(p)
    for axis, placement in enumerate(tensor.placements):
        if not (placement.is_replicate() or placement.is_partial()):
            kind = dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM
            dist.all_reduce(power, kind, group=tensor.device_mesh.get_group(axis))
    return power if p == math.inf else power.pow(1 / p)
