"""Gathers and reduces what FSDP2 alone would not, as it knows only of passes through its units as a whole."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from azureml_strategy.strategies.model_parallel.fsdp_internals import (
    agree_on_training,
    finish_backward,
    forms_by_layer,
    is_sharded,
)
from azureml_strategy.strategies.model_parallel.units import parts_of


class Gathering:
    """Keeps the sharded and the gathered parameters of a module right for any order of passes, toggles and steps.

    - A layer that is called by itself, outside of its unit's forward, gathers the unit. In a pass that has a backward
      pass, the unit then stays whole until the end of that: FSDP2 would free it when the unit's own pass ends, but the
      part's pass still needs it.
    - `requires_grad` of the parameters that are whole for all of a step can be changed within the step, as a generator
      and a critic toggle each other's.
    - Gradients that FSDP2 does not know of are reduced at the end of a backward pass.
    - After an evaluation step, and after a step that optimizes manually, all parameters are shards again: callbacks
      would change or average the gathered copies, and FSDP2 would throw these away.

    Args:
        module: sharded by `fully_shard`, itself or parts of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._units: dict[nn.Module, FSDPModule] = {
            each: each for each in module.modules() if isinstance(each, FSDPModule)
        }
        # in the order in which they were first needed, which all ranks share
        self._whole_in_backward: dict[nn.Module, FSDPModule] = {}
        self._agreed: dict[Any, bool] = {}
        self._forms: dict[nn.Module, list[Any]] = {}
        if isinstance(module, FSDPModule):
            self._whole_in_backward[module] = module
            self._forms = forms_by_layer(module)
        self.agree()
        self._hooks = [
            layer.register_forward_pre_hook(functools.partial(self._gather, unit), prepend=True)
            for unit in self._units
            for layer in parts_of(unit, set(self._units))
            if layer is not unit
        ]

    def before_backward(self) -> None:
        """Gather again what an earlier backward pass has freed and this one needs: FSDP2 knows only of whole units."""
        for unit in self._whole_in_backward.values():
            if is_sharded(unit):
                unit.unshard()

    def after_backward(self) -> None:
        """Reduce the gradients that are left, and free what was kept whole."""
        finish_backward(self._units.values())
        self.agree()
        for unit in self._whole_in_backward.values():
            unit.reshard()

    def after_step(self) -> None:
        """Make all parameters shards again."""
        self.agree()
        for unit in self._units.values():
            unit.reshard()

    def agree(self) -> None:
        """Apply a change of `requires_grad` to both forms of each parameter outside of the blocks."""
        for forms in self._forms.values():
            agree_on_training(forms, self._agreed)

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _gather(self, of: nn.Module, layer: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        if layer in self._forms:
            agree_on_training(self._forms[layer], self._agreed)
        unit = self._units[of]
        if not is_sharded(unit):
            return
        unit.unshard()
        if not torch.is_grad_enabled():

            def reshard(*_: object) -> None:
                handle.remove()
                unit.reshard()

            handle = layer.register_forward_hook(reshard)
        elif of not in self._whole_in_backward:
            self._whole_in_backward[of] = unit
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
