"""Weights that hooks change between steps reach the copies that DeepSpeed trains.

DeepSpeed's optimizer trains a copy of this rank's part of the parameters, in float32 or in the memory of the host.
After each step it overwrites the parameters by it. So a weight that a callback clamps, resets or loads would have its
old value back after the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from azureml_strategy.strategies.deepspeed_internals import (
    flat_memory,
    flat_parameters,
    is_whole,
    part_of_whole,
    persistent_parameters,
    trained_copies,
)
from azureml_strategy.strategies.equal_buffers import INTEGERS

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# Numbers that are compared at once: their temporary memory is small beside a step's own.
_CHUNK = 2**24
_SMALL = 2**16


class EditedWeights:
    """Takes edits of parameters into the copies that are trained, without waiting for the device.

    A number of a parameter that differs from its rounded copy was edited, unless the copy itself was set since the
    last step, as `deepspeed.utils.safe_set_full_fp32_param` does. Other numbers of the copy keep their digits.

    Args:
        engine: DeepSpeed's, of a training.
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
            own = _mark([copy]) == self._marks[index]
            for values, trained in zip(torch.split(part, _CHUNK), torch.split(copy, _CHUNK), strict=True):
                edited = own & (values != trained.to(values.dtype))
                trained.copy_(torch.where(edited, values.to(trained.dtype), trained))
            self._marks[index] = torch.where(own, _mark([copy]), self._marks[index])

    @torch.no_grad()
    def remember(self) -> None:
        """Note the copies as they are, after a step, or after a checkpoint was loaded."""
        self._marks = [_mark([copy]) for _, copy in trained_copies(self._engine)]
        self._mark_of_persistent = self._of_persistent()

    @torch.no_grad()
    def take_whole(self) -> None:
        """Take edits of whole parameters of ZeRO 3 into their parts, before a forward pass lets go of some."""
        own = self._of_persistent() == self._mark_of_persistent
        pairs = [part_of_whole(each) for each in filter(is_whole, persistent_parameters(self._engine))]
        if pairs:
            # There may be hundreds of them. A few operations for all take the host less time than two for each.
            values, parts = zip(*pairs, strict=True)
            taken = torch.where(own, torch.cat(values), torch.cat(parts))
            torch._foreach_copy_(parts, torch.split(taken, [each.numel() for each in parts]))
        self._mark_of_persistent = torch.where(own, self._of_persistent(), self._mark_of_persistent)

    def _of_persistent(self) -> Tensor:
        return _mark([each.ds_tensor for each in persistent_parameters(self._engine)])  # type: ignore[attr-defined]


def _mark(copies: list[Tensor]) -> Tensor:
    """Return a number that changes with the tensors. A sum of bits is one also beside NaN, as padding may be."""
    bits = [each.view(INTEGERS[each.itemsize]).flatten() for each in copies]
    small = [each for each in bits if each.numel() <= _SMALL]
    parts = [torch.cat(small)] if small else []
    parts += [part for each in bits if each.numel() > _SMALL for part in torch.split(each, _CHUNK)]
    return torch.stack([each.sum() for each in parts]).sum() if parts else torch.zeros((), dtype=torch.int64)
