"""Converts metrics, steps and hyperparameters to values that MLflow accepts."""

from __future__ import annotations

import math
import operator
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

import torch

from azureml_strategy.cluster.redaction import redact, redact_text
from azureml_strategy.lightning_internals import convert_params, flatten_dict
from azureml_strategy.tracking.batch import AZURE_PARAMS_PER_RUN, PARAM_VALUE_LENGTH, clean_name

# MLflow stores steps as signed integers of 64 bits.
_STEPS = range(-(2**63), 2**63)

# What to log instead of a value of a well-known type that is not a number.
_ADVICE: tuple[tuple[tuple[type, ...], str], ...] = (
    ((type(None),), "leave it out, or log float('nan')"),
    ((str, bytes), "text is no metric; use log_tags or log_hyperparams"),
    ((complex,), "log its real and imag parts, or abs() of it"),
    ((list, tuple, set, dict), "log each of its numbers under a name of its own, or their mean"),
)


class DeviceValue:
    """A CUDA tensor of one element. The GPU may still be computing it some time after `copy_to_host`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._copied: torch.cuda.Event | None = None

    @property
    def kind(self) -> tuple[torch.device, torch.dtype]:
        """Values of one kind are copied at once."""
        return self._tensor.device, self._tensor.dtype

    def __float__(self) -> float:
        if self._copied is None:
            copy_to_host([self])
        assert self._copied is not None
        self._copied.synchronize()
        return float(self._tensor)


def copy_to_host(values: Iterable[Any]) -> None:
    """Queue copies of those among the values that are a `DeviceValue`, and return at once.

    All values of one kind become one copy into pinned memory. It is queued after the work that computes them and before
    the work that the caller queues next. So reading a value later does not wait for that next work, and the caller may
    change the tensors in place.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[DeviceValue]] = {}
    for each in values:
        if isinstance(each, DeviceValue) and each._copied is None:
            kinds.setdefault(each.kind, []).append(each)
    for (device, _), alike in kinds.items():
        with torch.cuda.device(device):
            joined = torch.stack([each._tensor.reshape(()) for each in alike])
            on_host = joined.to("cpu", non_blocking=True)  # torch makes such a copy in pinned memory
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        for each, number in zip(alike, on_host.unbind(), strict=True):
            each._tensor, each._copied = number, copied


def as_number(value: Any) -> SupportsFloat:
    """Convert a value to a float; on the GPU to a `DeviceValue`, for `copy_to_host`, which is read later.

    `float()` of that object waits for the GPU; this function does not. NaN and infinity are numbers, and so are True
    and False: 1.0 and 0.0.

    Raises:
        ValueError: it is not one real number of 64 bits; the message says what to log instead.
    """
    if isinstance(value, torch.Tensor) and value.is_cuda and value.numel() == 1 and not value.is_complex():
        return DeviceValue(value)
    if _is_array(value):
        value = _only_element(value)
    advice = next((text for kinds, text in _ADVICE if isinstance(value, kinds)), None)
    if advice is not None:
        raise ValueError(advice)
    try:
        number = float(value)
    except Exception as error:  # the __float__ of a type may raise anything
        raise ValueError(f"float() says {type(error).__name__}: {error}; log a number that is made of it") from None
    if math.isinf(number) and abs(value) != math.inf:
        raise ValueError("it is too large for a float of 64 bits; log its logarithm")
    return number


def as_step(step: Any) -> int:
    """The step as an integer, truncated if it has a fraction.

    Raises:
        ValueError: it is not a number, or needs more than 64 bits.
    """
    try:
        step = operator.index(step)
    except TypeError:
        number = as_number(step)
        if not math.isfinite(float(number)):
            raise ValueError("it is not finite; give the step as an integer") from None
        step = int(float(number))
    if step not in _STEPS:
        raise ValueError("it does not fit into 64 bits; give the step as a smaller integer")
    return int(step)


def type_name(value: Any) -> str:
    """The name of the type for a warning, with the shape of an array."""
    shape = value.shape if _is_array(value) else ()
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape else "")


def _is_array(value: Any) -> bool:
    """Whether its type is an array or scalar of torch, NumPy or the like. The object itself may make up attributes."""
    return hasattr(type(value), "item") and hasattr(type(value), "shape")


def _only_element(array: Any) -> Any:
    size = math.prod(array.shape)
    if size != 1:
        raise ValueError(f"it has {size} elements; log one number of it, such as its mean()")
    try:
        return array.item()
    except Exception as error:  # a tensor on the meta device, for example, has a shape but no value
        raise ValueError(f"its value cannot be read ({type(error).__name__}: {error}); log a plain number") from None


def as_texts(params: dict[str, Any] | Namespace) -> dict[str, str]:
    """Flatten nested hyperparameters to names `a/b` and texts, without secrets and cut to the length limit."""
    flat = flatten_dict(redact("", convert_params(params)))
    return {clean_name(name): redact_text(str(value))[:PARAM_VALUE_LENGTH] for name, value in flat.items()}


def new_params(recorded: Mapping[str, str], params: Mapping[str, str]) -> dict[str, str]:
    """The parameters that the run does not have yet.

    A store never changes a parameter, and a retried or resumed job logs into the same run, so the first value stays.
    """
    changed = [name for name, value in params.items() if recorded.get(name, value) != value]
    if changed:
        kept = ", ".join(f"{name}={redact(name, recorded[name])} (now {params[name]})" for name in changed[:5])
        warnings.warn(
            f"The run already has other values of {len(changed)} hyperparameter(s), and MLflow never changes one: "
            f"the first stay, {kept}{', ...' if len(changed) > 5 else ''}. A run of its own records the new ones.",
            stacklevel=4,
        )
    return {name: value for name, value in params.items() if name not in recorded}


def fit_azure(recorded: Mapping[str, str], params: dict[str, str]) -> dict[str, str]:
    """The first parameters, as many as Azure ML still accepts in the run."""
    room = max(AZURE_PARAMS_PER_RUN - len(recorded), 0)
    if len(params) > room:
        warnings.warn(
            f"Azure ML takes {AZURE_PARAMS_PER_RUN} hyperparameters a run: the last {len(params) - room} are not "
            f"logged, from {list(params)[room]} on. Log the rest as a file: logger.experiment.log_dict(...).",
            stacklevel=4,
        )
    return dict(list(params.items())[:room])
