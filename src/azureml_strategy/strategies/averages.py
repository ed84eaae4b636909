"""Keeps averages of weights in float32 where the weights train in 16 bits.

An average with a decay of 0.999 moves by a thousandth of a difference. bfloat16 has steps of a 256th: the average would
never move. Lightning's callbacks copy the module before a `*-true` precision casts it, so their average is float32 if
the module was. But for each validation they swap it with the module's weights, through the type of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
# The values of averages that a module has at the moment.
_lent: WeakKeyDictionary[nn.Module, list[Tensor]] = WeakKeyDictionary()


def keep_averages(trainer: Trainer, precision: str) -> None:
    """Have the averages of Lightning's callbacks whole, and in float32. They are copies that nothing computes with.

    Call it after `configure_model` and the callbacks' `setup`, and before a checkpoint is loaded into them.

    Args:
        trainer: with the callbacks.
        precision: as in `Trainer(precision=...)`.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            _copy_anew(callback, trainer)
        average = average_of(callback) if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)) else None
        if average is None or not (_widen(average) or precision in ("bf16-true", "16-true")):
            continue
        if isinstance(average, AveragedModel) and average.multi_avg_fn is None:
            own = average.avg_fn or get_swa_avg_fn()  # type: ignore[no-untyped-call]
            average.avg_fn = partial(_average_in_its_type, own)
        if isinstance(callback, WeightAveraging):
            extend_swap(callback, _swap_exactly)


def tell_rounded_averages(callbacks: Iterable[Callback], module: LightningModule) -> None:
    """Warn of averages of the user's in 16 bits. They are not widened: a step may compute with them."""
    found = [name for name, each in _averages(callbacks, module) if any(map(_is_half, each.parameters()))]
    if found:
        rank_zero_warn(
            f"{', '.join(found)} averages weights in 16 bits, which lose what an average moves by in a step: with a "
            "decay of 0.999 it may never move. Use lightning.pytorch.callbacks.EMAWeightAveraging, which has its "
            "average in float32 here, or precision='bf16-mixed', which has all weights in float32."
        )


def _averages(callbacks: Iterable[Callback], module: LightningModule) -> Iterator[tuple[str, nn.Module]]:
    for name, each in module.named_modules():
        if isinstance(each, AveragedModel):
            yield name, each
    for callback in callbacks:
        for name, value in vars(callback).items():
            if isinstance(value, AveragedModel):
                yield f"{type(callback).__name__}.{name}", value


def _copy_anew(callback: StochasticWeightAveraging, trainer: Trainer) -> None:
    """Have a callback copy the module again if `configure_model` has added to it: it would not average that."""
    average, module = average_of(callback), trainer.lightning_module
    if average is not None and len(list(average.parameters())) < len(list(module.parameters())):
        callback.setup(trainer, module, "fit")


def _widen(average: nn.Module) -> bool:
    """Make what is 16 bits float32, and tell whether anything was."""
    parameters = list(filter(_is_half, average.parameters()))
    for parameter in parameters:
        parameter.data = parameter.data.float()
    for owner in average.modules():
        halves = {name: each for name, each in owner.named_buffers(recurse=False) if _is_half(each)}
        owner._buffers |= {name: each.float() for name, each in halves.items()}
    return bool(parameters)


def _average_in_its_type(average: Callable[..., Tensor], kept: Tensor, new: Tensor, count: Any) -> Tensor:
    """Average weights in the type of the average: a hundredth of a weight in bfloat16 is rounded again."""
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
