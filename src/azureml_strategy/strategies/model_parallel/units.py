"""Chooses the modules that FSDP2 gathers one at a time, its units; gathers and reduces where FSDP2 alone would not.

FSDP2 knows only of passes through its units as a whole.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.fsdp import FSDPModule

from azureml_strategy.strategies.model_parallel.fsdp_internals import (
    agree_on_training,
    finish_backward,
    forms_by_layer,
    is_sharded,
)

# How many names a message lists.
_SHOWN = 3


def units_of(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """List the modules to shard one by one, those inside of others first, as `fully_shard` needs them.

    FSDP2 gives each parameter to one unit. So a layer that several blocks share becomes a unit of its own, and is
    gathered for each call. A parameter that several blocks share without sharing its layer can only be gathered with
    the rest of the module, and these blocks with it.
    """
    units = set(blocks)
    while found := _shared_layers(module, units):
        units |= found
    while shared := _in_several(module, units):
        names = {parameter: name for name, parameter in module.named_parameters()}
        shown = ", ".join(sorted(names[each] for each in shared)[:_SHOWN])
        rank_zero_warn(
            f"Several of the sharded blocks of {type(module).__name__} have the parameter {shown}. These blocks are "
            "gathered for the whole step: only their gradients and optimizer state take less memory. A layer that they "
            "share as a module would be gathered by itself."
        )
        units -= set().union(*shared.values())
    # a module has more parts than any module inside of it
    parts = dict.fromkeys([*module.modules(), *blocks])
    return sorted((each for each in parts if each in units), key=lambda unit: len([*unit.modules()]))


def homes_of(module: nn.Module, units: set[nn.Module]) -> dict[nn.Module, set[nn.Module]]:
    """Return the innermost units in which each part of a module is found, on all paths to it.

    A part that a path finds outside of all units has the whole module as its unit.
    """
    homes: defaultdict[nn.Module, set[nn.Module]] = defaultdict(set)
    waiting = [(module, module)]
    while waiting:
        each, home = waiting.pop()
        home = each if each in units else home
        if home not in homes[each]:
            homes[each].add(home)
            waiting += [(child, home) for child in each.children()]
    return dict(homes)


def _shared_layers(module: nn.Module, units: set[nn.Module]) -> set[nn.Module]:
    """Return the outermost layers with parameters that are found in several units."""
    shared = {
        each
        for each, homes in homes_of(module, units).items()
        if len(homes) > 1 and any(True for _ in each.parameters()) and type(each).forward is not nn.Module.forward
    }
    inside = {below for each in shared for below in each.modules() if below is not each}
    return shared - inside


def _in_several(module: nn.Module, units: set[nn.Module]) -> dict[nn.Parameter, set[nn.Module]]:
    """Return the parameters that are found in several units, with these units, but not the whole module."""
    homes: defaultdict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for each, found in homes_of(module, units).items():
        for parameter in each.parameters(recurse=False):
            homes[parameter] |= found
    return {parameter: found & units for parameter, found in homes.items() if len(found) > 1}


def parts_of(unit: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """List the layers of a unit that have parameters, without those of units inside of it."""
    waiting, visited = [unit], set[nn.Module]()
    while waiting:
        each = waiting.pop()
        if each in visited or (each in units and each is not unit):
            continue
        visited.add(each)
        if any(True for _ in each.parameters(recurse=False)):
            yield each
        waiting += each.children()


class Gathering:
    """Keeps the sharded and the gathered parameters of a module right for any order of passes, toggles and steps.

    - A layer that is called by itself, outside of its unit's forward, gathers the unit. If a backward pass follows, the
      unit stays whole until the end of that: FSDP2 would free it at the end of the unit's own backward pass, although
      the layer's still needs it.
    - `requires_grad` of the parameters that are whole for all of a step can be changed within the step, as a generator
      and a critic toggle each other's.
    - Gradients that FSDP2 does not know of are reduced at the end of a backward pass.
    - After an evaluation step, and after a step that optimizes manually, all parameters are shards again: callbacks
      would change or average the gathered copies, and FSDP2 would throw these away.

    Args:
        module: sharded by `fully_shard`, itself or parts of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._units: list[Any] = [each for each in module.modules() if isinstance(each, FSDPModule)]
        # in the order in which they were first needed, which is the same on all ranks
        self._whole_in_backward: list[Any] = [module] if isinstance(module, FSDPModule) else []
        self._agreed: dict[Any, bool] = {}
        self._forms = forms_by_layer(module) if isinstance(module, FSDPModule) else {}
        self.agree()
        self._hooks = [
            layer.register_forward_pre_hook(functools.partial(self._gather, unit), prepend=True)
            for unit in self._units
            for layer in parts_of(unit, set(self._units))
            if layer is not unit
        ]

    def before_backward(self) -> None:
        """Gather units again that an earlier backward pass has freed and this one needs."""
        for unit in self._whole_in_backward:
            if is_sharded(unit):
                unit.unshard()

    def after_backward(self) -> None:
        """Reduce the gradients that are left, and free the units that were kept whole."""
        finish_backward(self._units)
        self.agree()
        for unit in self._whole_in_backward:
            unit.reshard()

    def after_step(self) -> None:
        """Make all parameters shards again."""
        self.agree()
        for unit in self._units:
            unit.reshard()

    def agree(self) -> None:
        """Apply a change of `requires_grad` to both forms of each parameter outside of the blocks."""
        for forms in self._forms.values():
            agree_on_training(forms, self._agreed)

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _gather(self, unit: Any, layer: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        if layer in self._forms:
            agree_on_training(self._forms[layer], self._agreed)
        if not is_sharded(unit):
            return
        unit.unshard()
        if not torch.is_grad_enabled():

            def reshard(*_: object) -> None:
                handle.remove()
                unit.reshard()

            handle = layer.register_forward_hook(reshard)
        elif unit not in self._whole_in_backward:
            self._whole_in_backward.append(unit)
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
