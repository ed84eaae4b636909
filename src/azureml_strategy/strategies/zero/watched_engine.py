"""Watches an engine of DeepSpeed in a loop of the user's own, for steps that it would take wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from azureml_strategy.strategies.deepspeed_internals import (
    begin_further_backward,
    can_add_gradients,
    discard_gradients,
    end_further_backward,
)
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.zero.edited_weights import EditedWeights
from azureml_strategy.strategies.zero.refusals import StartingParameters, refuse_group, refuse_second_backward


class WatchedEngine:
    """An engine, and whether it awaits a step.

    Args:
        engine: DeepSpeed's, of a training.
        module: inside of it.
        starting: what trained before the engine was made.
        beside: all engines of the strategy.

    Attributes:
        engine: as given.
        awaits_step: whether a backward pass came after the last step.
        edited: edits of the weights between steps.
    """

    def __init__(
        self, engine: Any, module: nn.Module, starting: StartingParameters, beside: Mapping[nn.Module, WatchedEngine]
    ) -> None:
        self.engine, self._module, self._starting, self._beside = engine, module, starting, beside
        self.awaits_step = self._in_backward = False
        self._earlier: dict[int, list[Tensor]] = {}
        self.edited = EditedWeights(engine)
        self._watch_optimizer()
        engine.register_forward_pre_hook(lambda *_: self.edited.take_whole())
        engine.register_forward_hook(self._watch_outputs)

    def before_backward(self) -> None:
        """Prepare for a backward pass.

        Raises:
            ConfigurationError: a parameter was frozen or unfrozen, or DeepSpeed cannot add up gradients.
        """
        if self.awaits_step and not can_add_gradients(self.engine):
            refuse_second_backward(self._module)
        self._starting.require_same()
        self._earlier = begin_further_backward(self.engine) if self.awaits_step else {}
        self._in_backward = True

    def after_backward(self) -> None:
        """Add the gradients of earlier passes."""
        end_further_backward(self.engine, self._earlier)
        self._earlier, self._in_backward = {}, False
        self.awaits_step = True

    def before_step(self) -> None:
        """Prepare for a step. DeepSpeed's calls `zero_grad` before it takes the gradients."""
        self.awaits_step = False
        self.edited.take()

    def after_step(self) -> None:
        """Note that a step is done."""
        self.edited.remember()

    def _watch_optimizer(self) -> None:
        optimizer = self.engine.optimizer
        own: Any = type(optimizer)

        def zero_grad(_: object, *args: Any, **kwargs: Any) -> None:
            if self.awaits_step:
                discard_gradients(self.engine)
                self.awaits_step = False
            own.zero_grad(optimizer, *args, **kwargs)

        # Fabric's wrapper calls the method of the class, past one of the instance.
        optimizer.__class__ = type(own.__name__, (own,), {"zero_grad": zero_grad, "__module__": own.__module__})
        if not hasattr(optimizer, "add_param_group"):
            optimizer.add_param_group = refuse_group

    def _watch_outputs(self, engine: nn.Module, inputs: object, outputs: Any) -> None:
        def watch(output: Tensor) -> Tensor:
            if output.requires_grad:
                output.register_hook(self._on_backward)  # type: ignore[no-untyped-call]
            return output

        if torch.is_grad_enabled():
            apply_to_collection(outputs, Tensor, watch)

    def _on_backward(self, _: Tensor) -> None:
        if any(each._in_backward for each in self._beside.values() if each is not self):
            name = type(self._module).__name__
            raise ConfigurationError(
                f"A backward pass of another module goes through {name}, which has an engine of DeepSpeed's too, and "
                "no two engines can be in one pass: gradients would be left to the next step. Use "
                "strategy='azureml_ddp', or 'azureml_model_parallel', which shards parameters too."
            )
