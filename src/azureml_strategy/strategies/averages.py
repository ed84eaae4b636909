"""Keeps averages of weights in float32 where the weights train in 16 bits.

With a decay of 0.999 an average moves by a thousandth of a difference. bfloat16 has steps of a 256th: the average would
never move. Lightning's callbacks copy the module before a `*-true` precision casts it, so their average is float32 if
the module was. But for each validation they swap it with the module's weights, which rounds it to the weights' type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from azureml_strategy.lightning_internals import average_of, extend_swap
from azureml_strategy.strategies.mixed_precision import HALVES

# The exact values of each average that is swapped with the module's weights at the moment.
_exact_values: WeakKeyDictionary[nn.Module, list[Tensor]] = WeakKeyDictionary()


def keep_averages(trainer: Trainer, precision: str) -> None:
    """Make the averages of Lightning's callbacks complete and float32. They are copies that no step computes with.

    Call it after `configure_model` and the callbacks' `setup`, and before a checkpoint is loaded into them.
    """
    module = trainer.lightning_module
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        average = average_of(callback) if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)) else None
        if average is None:
            continue
        misses_some = len(list(average.parameters())) < len(list(module.parameters()))
        if isinstance(callback, StochasticWeightAveraging) and misses_some:
            # configure_model has added layers to the module after the callback had copied it.
            callback.setup(trainer, module, "fit")
            average = average_of(callback)
            assert average is not None
        if not (_widen(average) or precision in ("bf16-true", "16-true")):
            continue
        if isinstance(average, AveragedModel) and average.multi_avg_fn is None:
            # Otherwise a fraction of a weight would be computed in the weight's type, and rounded.
            average_of_two = average.avg_fn or get_swa_avg_fn()  # type: ignore[no-untyped-call]
            average.avg_fn = partial(_average_in_its_type, average_of_two)
        if isinstance(callback, WeightAveraging):
            extend_swap(callback, _swap_exactly)


def warn_of_rounded_averages(callbacks: Iterable[Callback], module: LightningModule) -> None:
    """Warn of the user's own averages in 16 bits. They are not made float32: a step may compute with them."""
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
    """Make parameters and buffers of 16 bits float32, and return whether there was such a parameter."""
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
    return tensor.dtype in HALVES


def _swap_exactly(average: nn.Module, swap: Callable[[], None]) -> None:
    """Swap an average with the weights of a module, or swap back and restore its exact values."""
    values = [each.data for each in (*average.parameters(), *average.buffers())]
    exact = _exact_values.pop(average, None)
    if exact is None:
        _exact_values[average] = [each.clone() for each in values]
    swap()
    for value, kept in zip(values, exact or (), strict=False):
        value.copy_(kept)
