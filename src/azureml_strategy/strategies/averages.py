"""Keeps averages of weights in float32 where the weights train in 16 bits.

An average with a decay of 0.999 moves by a thousandth of a difference. bfloat16 has steps of a 256th: the average would
never move. Lightning's callbacks copy the module before a `*-true` precision casts it, so their average is float32 if
the module was. But for each validation they swap it with the module's weights, through the type of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from azureml_strategy.lightning_internals import average_of, extend_swap

_HALVES = (torch.bfloat16, torch.float16)
# While an average is swapped with the module's weights: its own values, not rounded to the type of those.
_lent: WeakKeyDictionary[nn.Module, list[Tensor]] = WeakKeyDictionary()


def keep_averages(trainer: Trainer, precision: str) -> None:
    """Make the averages of Lightning's callbacks whole and float32. They are copies that no step computes with.

    Call it after `configure_model` and the callbacks' `setup`, and before a checkpoint is loaded into them.

    Args:
        trainer: with the callbacks.
        precision: as in `Trainer(precision=...)`.
    """
    module = trainer.lightning_module
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        average = average_of(callback) if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)) else None
        if average is None:
            continue
        misses_some = len(list(average.parameters())) < len(list(module.parameters()))
        if isinstance(callback, StochasticWeightAveraging) and misses_some:
            # configure_model has added to the module after the callback copied it, and it would not average that.
            callback.setup(trainer, module, "fit")
            average = average_of(callback)
            assert average is not None
        if not (_widen(average) or precision in ("bf16-true", "16-true")):
            continue
        if isinstance(average, AveragedModel) and average.multi_avg_fn is None:
            # In the type of the average: a hundredth of a weight in bfloat16 would be rounded again.
            own = average.avg_fn or get_swa_avg_fn()  # type: ignore[no-untyped-call]
            average.avg_fn = partial(_average_in_its_type, own)
        if isinstance(callback, WeightAveraging):
            extend_swap(callback, _swap_exactly)


def warn_of_rounded_averages(callbacks: Iterable[Callback], module: LightningModule) -> None:
    """Warn of averages of the user's in 16 bits. They are not widened: a step may compute with them."""
    averages = [*module.named_modules()]
    for callback in callbacks:
        averages += [(f"{type(callback).__name__}.{name}", value) for name, value in vars(callback).items()]
    found = [
        name for name, each in averages if isinstance(each, AveragedModel) and any(map(_is_half, each.parameters()))
    ]
    if found:
        rank_zero_warn(
            f"{', '.join(found)} averages weights in 16 bits, which lose what an average moves by in a step: with a "
            "decay of 0.999 it may never move. Use lightning.pytorch.callbacks.EMAWeightAveraging, which has its "
            "average in float32 here, or precision='bf16-mixed', which has all weights in float32."
        )


def _widen(average: nn.Module) -> bool:
    """Make what is 16 bits float32, and return whether a parameter was."""
    parameters = list(filter(_is_half, average.parameters()))
    for parameter in parameters:
        parameter.data = parameter.data.float()
    for owner in average.modules():
        halves = {name: each for name, each in owner.named_buffers(recurse=False) if _is_half(each)}
        owner._buffers |= {name: each.float() for name, each in halves.items()}
    return bool(parameters)


def _average_in_its_type(average: Callable[..., Tensor], kept: Tensor, new: Tensor, count: Any) -> Tensor:
    return average(kept, new.to(kept.dtype), count)


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in _HALVES


def _swap_exactly(average: nn.Module, swap: Callable[[], None]) -> None:
    """Swap an average with the weights of a module, and give it its own values back instead of rounded ones."""
    values = [each.data for each in (*average.parameters(), *average.buffers())]
    own = _lent.pop(average, None)
    if own is None:
        _lent[average] = [each.clone() for each in values]
    swap()
    for value, kept in zip(values, own or (), strict=False):
        value.copy_(kept)
