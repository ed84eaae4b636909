"""Watches DeepSpeed's engines for steps that they would take wrongly, and takes weights that hooks change between steps
into the copies that DeepSpeed trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from azureml_strategy.strategies.deepspeed_internals import (
    begin_further_backward,
    can_add_gradients,
    discard_gradients,
    end_further_backward,
    flat_memory,
    flat_parameters,
    is_whole,
    part_of_whole,
    persistent_parameters,
    trained_copies,
)
from azureml_strategy.strategies.equal_buffers import INTEGERS
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.zero.refusals import StartingParameters, refuse_group, refuse_second_backward

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# At most this many numbers are compared at once: their temporary memory is small beside a step's own.
_CHUNK = 2**24
_SMALL = 2**16


class EditedWeights:
    """Takes edits of parameters into the copies that are trained, without waiting for the device.

    A number of a parameter that differs from its rounded copy was edited, unless the copy itself was set since the
    last step, as `deepspeed.utils.safe_set_full_fp32_param` does. Other numbers of the copy keep their digits.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._views = [(each, each.data) for each in flat_parameters(engine)]
        self.remember()

    @torch.no_grad()
    def take(self) -> None:
        """Take edits, before a step or a checkpoint."""
        # `parameter.data = values` takes a parameter out of DeepSpeed's memory: put the values into that again.
        moved = [(each, view) for each, view in self._views if each.data_ptr() != view.data_ptr()]
        memory = {each.untyped_storage().data_ptr() for each in flat_memory(self._engine)} if moved else set()
        for parameter, view in moved:
            if view.untyped_storage().data_ptr() in memory and view.shape == parameter.shape:
                view.copy_(parameter)
                parameter.data = view
        self.take_whole()
        for index, (part, copy) in enumerate(trained_copies(self._engine)):
            unset = _mark([copy]) == self._marks[index]
            for values, trained in zip(torch.split(part, _CHUNK), torch.split(copy, _CHUNK), strict=True):
                edited = unset & (values != trained.to(values.dtype))
                trained.copy_(torch.where(edited, values.to(trained.dtype), trained))
            self._marks[index] = torch.where(unset, _mark([copy]), self._marks[index])

    @torch.no_grad()
    def remember(self) -> None:
        """Note what the copies hold, after a step, or after a checkpoint was loaded."""
        self._marks = [_mark([copy]) for _, copy in trained_copies(self._engine)]
        self._mark_of_persistent = self._of_persistent()

    @torch.no_grad()
    def take_whole(self) -> None:
        """Take edits of whole parameters of ZeRO 3 into their parts, before a forward pass lets go of some."""
        unset = self._of_persistent() == self._mark_of_persistent
        pairs = [part_of_whole(each) for each in filter(is_whole, persistent_parameters(self._engine))]
        if pairs:
            # There may be hundreds of them. A few operations for all take the host less time than two for each.
            values, parts = zip(*pairs, strict=True)
            taken = torch.where(unset, torch.cat(values), torch.cat(parts))
            torch._foreach_copy_(parts, torch.split(taken, [each.numel() for each in parts]))
        self._mark_of_persistent = torch.where(unset, self._of_persistent(), self._mark_of_persistent)

    def _of_persistent(self) -> Tensor:
        return _mark([each.ds_tensor for each in persistent_parameters(self._engine)])  # type: ignore[attr-defined]


def _mark(copies: list[Tensor]) -> Tensor:
    """Return a number that changes with the tensors: a sum of their bits, as values may be NaN, also in padding."""
    bits = [each.view(INTEGERS[each.itemsize]).flatten() for each in copies]
    small = [each for each in bits if each.numel() <= _SMALL]
    parts = [torch.cat(small)] if small else []
    parts += [part for each in bits if each.numel() > _SMALL for part in torch.split(each, _CHUNK)]
    return torch.stack([each.sum() for each in parts]).sum() if parts else torch.zeros((), dtype=torch.int64)


class WatchedEngine:
    """An engine of DeepSpeed's in a training, which may await a step.

    Args:
        engine: DeepSpeed's.
        module: inside of it.
        starting: what trained before the engine was made.

    Attributes:
        awaits_step: whether a backward pass came after the last step.
        edited: edits of the weights between steps.
    """

    def __init__(self, engine: Any, module: nn.Module, starting: StartingParameters) -> None:
        self.engine, self._module, self._starting = engine, module, starting
        self.awaits_step = self._in_backward = False
        self._earlier: dict[int, list[Tensor]] = {}
        self.edited = EditedWeights(engine)
        optimizer, kind, forget = engine.optimizer, type(engine.optimizer), engine.optimizer.zero_grad

        def zero_grad(_: object, *args: Any, **kwargs: Any) -> None:
            if self.awaits_step:
                discard_gradients(engine)
                self.awaits_step = False
            forget(*args, **kwargs)

        # The Trainer's and Fabric's wrappers call the method of the class, past one of the instance.
        members = {"zero_grad": zero_grad, "__module__": kind.__module__}
        optimizer.__class__ = type(kind.__name__, (kind,), members)
        if not hasattr(optimizer, "add_param_group"):
            optimizer.add_param_group = refuse_group

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


class FabricEngine(WatchedEngine):
    """One of the engines that a loop under Fabric calls. `beside` are all engines of the strategy."""

    def __init__(
        self, engine: Any, module: nn.Module, starting: StartingParameters, beside: Mapping[nn.Module, FabricEngine]
    ) -> None:
        super().__init__(engine, module, starting)
        self._beside = beside
        engine.register_forward_pre_hook(lambda *_: self.edited.take_whole())
        engine.register_forward_hook(self._watch_outputs)

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
