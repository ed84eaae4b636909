"""Writes a calibration as JSON and reads it again, so that it can be kept under version control."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from azureml_strategy.planning.calibration import Calibration, Fit, FittedNumber
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.fitted import (
    Adjustment,
    Correction,
    Parameters,
    default_parameters,
)

_COMPUTE = ("gpu", "family", "precision", "compiled")
_LINK = ("vm_size", "network")
_MOST = 1e4  # no factor that a fit finds is larger, nor its inverse


def calibration_values(calibration: Calibration) -> dict[str, Any]:
    """The calibration as values of JSON: what `read_calibration` takes, with the sentences for a reader."""
    known = calibration.parameters
    return {
        "calibration": known.name,
        "lines": calibration.lines(),
        "corrections": [
            dict(zip(_COMPUTE, key, strict=True)) | asdict(value) for key, value in known.corrections.items()
        ],
        "adjustments": [dict(zip(_LINK, key, strict=True)) | asdict(value) for key, value in known.adjustments.items()],
        "fits": [asdict(each) for each in calibration.fits],
        "numbers": [asdict(each) for each in calibration.numbers],
    }


def _values(names: tuple[str, ...], key: tuple[Any, ...], value: Correction | Adjustment) -> dict[str, Any]:
    return {**dict(zip(names, key, strict=True)), **asdict(value)}


def write_calibration(calibration: Calibration) -> bytes:
    """The content of a file that `read_calibration` takes."""
    return json.dumps(calibration_values(calibration), indent=2).encode() + b"\n"


def read_calibration(content: str, name: str, parameters: Parameters | None = None) -> Calibration:
    """Read what `write_calibration` wrote.

    Args:
        content: of the file.
        name: of the file, for messages.
        parameters: what is known without the runs; by default fitted.toml.

    Raises:
        PlanError: it is no such file, or a number in it makes no sense.
    """
    known = parameters or default_parameters()
    try:
        values = json.loads(content)
        corrections = dict(_entry(each, _COMPUTE, Correction, _check_correction) for each in values["corrections"])
        adjustments = dict(_entry(each, _LINK, Adjustment, _check_adjustment) for each in values["adjustments"])
        fitted = replace(
            known,
            name=str(values["calibration"]),
            corrections={**known.corrections, **corrections},
            adjustments={**known.adjustments, **adjustments},
        )
        fits = tuple(Fit(**each) for each in values["fits"])
        numbers = tuple(FittedNumber(**each) for each in values["numbers"])
        _check_fits(fits)
        _check_numbers(numbers)
        return Calibration(fitted, fits, numbers)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PlanError(
            f"{name} is no calibration ({type(error).__name__}: {error}). Give the file of "
            "`azureml-strategy plan RECIPE --calibrate RUN --save-calibration FILE`, or the ids of runs."
        ) from error


def _entry(
    given: Mapping[str, Any], names: tuple[str, ...], kind: Callable[..., Any], check: Callable[[Any], None]
) -> tuple[Any, Any]:
    key = tuple(given[name] for name in names)
    value = kind(**{name: each for name, each in given.items() if name not in names})
    check(value)
    return key, value


def _check_correction(value: Correction) -> None:
    _check_factors(factor=value.factor, error=value.error)


def _check_adjustment(value: Adjustment) -> None:
    factors = {each.name: getattr(value, each.name) for each in fields(value) if each.name not in ("error", "source")}
    _check_factors(**factors, **({} if value.error is None else {"error": value.error}))


def _check_fits(fits: tuple[Fit, ...]) -> None:
    for each in fits:
        held_out = {} if each.left_out is None else {"left_out": each.left_out}
        _check_positive(measured=each.measured, before=each.before, after=each.after, naive=each.naive, **held_out)


def _check_numbers(numbers: tuple[FittedNumber, ...]) -> None:
    for each in numbers:
        if not all(isinstance(text, str) for text in (each.what, each.place, each.unit)):
            raise ValueError(f"{each.what} has no name, place or unit")
        if not (0 <= each.before < math.inf and 0 <= each.after < math.inf):
            raise ValueError(f"{each.what} is {each.after}")


def _check_factors(**factors: Any) -> None:
    for name, value in factors.items():
        if not 1 / _MOST < value < _MOST:
            raise ValueError(f"{name} is {value}")


def _check_positive(**numbers: Any) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}")
