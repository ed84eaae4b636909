"""Private names of torch's FSDP2. There is no public way to ask what is gathered, and what is not yet reduced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def begin_as_root(module: FSDPModule) -> None:
    """Make a module the root, which ends backward passes. Otherwise the first block called by itself would be it."""
    module._get_fsdp_state()._lazy_init()


def is_sharded(unit: FSDPModule) -> bool:
    """Whether none of a unit's parameters is gathered."""
    return all(group.is_sharded for group in _groups(unit._get_fsdp_state()))


def forms_by_layer(unit: FSDPModule) -> dict[nn.Module, list[Any]]:
    """Return FSDP2's records of a unit's parameters, by each layer that has the parameter."""
    found: dict[nn.Module, list[Any]] = {}
    for each in _parameters(unit._get_fsdp_state()):
        places = each._module_info
        for layer in (places.module, *places.shared_modules):
            found.setdefault(layer, []).append(each)
    return found


def agree_on_training(forms: Iterable[Any], agreed: dict[Any, bool]) -> None:
    """Apply a change of `requires_grad` to both forms of each parameter, the sharded and the gathered one.

    A user changes the form that the module has at that moment, and an optimizer has the sharded one.

    Args:
        forms: of `forms_by_layer`.
        agreed: the earlier value of both forms; is updated.
    """
    for each in forms:
        gathered, sharded = getattr(each, "_unsharded_param", None), each.sharded_param
        before = agreed.setdefault(each, sharded.requires_grad)
        if gathered is None:
            agreed[each] = sharded.requires_grad
            continue
        trains = gathered.requires_grad if gathered.requires_grad != before else sharded.requires_grad
        for form in (sharded, gathered):
            if form.requires_grad != trains:
                form.requires_grad_(trains)
        agreed[each] = trains


def memory_of(parameter: DTensor) -> int:
    """Return a number that identifies the memory of a sharded parameter. It changes when `parameter.data` is set."""
    return int(parameter.untyped_storage()._cdata)


def finish_backward(units: Iterable[FSDPModule]) -> None:
    """Reduce the gradients that a backward pass has left in gathered parameters, as FSDP2 does at its end.

    Hooks on the outputs of its units call FSDP2. So nothing calls it after a pass through layers outside of all units.
    And for FSDP2 a unit is done when its inputs have gradients, even if a part of it was also called by itself.
    """
    for unit in units:
        state: Any = unit._get_fsdp_state()
        if state._is_root and any(
            _has_unreduced_gradient(each) for other in state._state_ctx.all_states for each in _parameters(other)
        ):
            state._root_post_backward_final_callback()


def _has_unreduced_gradient(form: Any) -> bool:
    gathered = getattr(form, "_unsharded_param", None)
    return gathered is not None and (gathered.grad is not None or form.unsharded_accumulated_grad is not None)


def _parameters(state: Any) -> Iterator[Any]:
    for group in _groups(state):
        yield from group.fsdp_params


def _groups(state: Any) -> list[Any]:
    # older releases of torch have at most one
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]
