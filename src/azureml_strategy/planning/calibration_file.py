"""Writes a calibration as JSON and reads it again, so that it can be kept under version control."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, get_args, get_origin, get_type_hints

from azureml_strategy.gpus import known_gpus
from azureml_strategy.network.vm_sizes import lookup_vm_size
from azureml_strategy.planning.calibration import Calibration, Fit, FittedNumber
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.fabrics import NetworkKind
from azureml_strategy.planning.fitted import (
    Adjustment,
    ComputeKey,
    Correction,
    LinkKey,
    Parameters,
    SeenNetwork,
    default_parameters,
)
from azureml_strategy.planning.kernels import peak
from azureml_strategy.planning.networks import Family

_COMPUTE = ("gpu", "family", "precision", "compiled")
_LINK = ("vm_size", "network")
_FACTORS = ("inside", "across", "latency", "slowdown", "skew")
_MOST = 100.0  # no factor that a fit finds is larger, nor its inverse


def calibration_values(calibration: Calibration) -> dict[str, Any]:
    """The calibration as values of JSON: what `read_calibration` takes, with the sentences for a reader."""
    known = calibration.parameters
    return {
        "calibration": known.name,
        "version": calibration.version,
        "lines": calibration.lines(),
        "corrections": [_values(_COMPUTE, *each) for each in known.corrections.items()],
        "adjustments": [_values(_LINK, *each) for each in known.adjustments.items()],
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
        corrections = dict(_correction(each) for each in values["corrections"])
        adjustments = dict(_adjustment(each) for each in values["adjustments"])
        fits = tuple(_fit(each) for each in values["fits"])
        numbers = tuple(_number(each) for each in values["numbers"])
        texts = {key: values[key] for key in ("calibration", "version")}
        _check_types({"calibration": str, "version": str}, texts)
        if not (corrections and fits and numbers):
            raise ValueError("it has no correction, fit or number")
        fitted = replace(
            known,
            name=texts["calibration"],
            corrections={**known.corrections, **corrections},
            adjustments={**known.adjustments, **adjustments},
        )
        return Calibration(fitted, fits, numbers, texts["version"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise PlanError(
            f"{name} is no calibration ({type(error).__name__}: {error}). Give the file of "
            "`azureml-strategy plan RECIPE --calibrate RUN --save-calibration FILE`, or the ids of runs."
        ) from error


def _correction(given: Mapping[str, Any]) -> tuple[ComputeKey, Correction]:
    gpu, family, precision, compiled = key = tuple(given[name] for name in _COMPUTE)
    _check_types({"gpu": str, "family": str, "precision": str, "compiled": bool}, dict(zip(_COMPUTE, key, strict=True)))
    card = next((each for each in known_gpus() if each.model == gpu), None)
    if card is None or family not in get_args(Family):
        raise ValueError(f"nothing is known of {gpu!a} and {family!a}")
    peak(card, precision)  # says what precisions there are
    others = {name: each for name, each in given.items() if name not in (*_COMPUTE, "networks")}
    networks = tuple(SeenNetwork(**each) for each in given["networks"])
    value = Correction(**others, networks=networks)
    for each in (value, *networks):
        _check_fields(each)
    _check_factors(factor=value.factor)
    _check_error(value.error)
    _check_positive(smallest_batch=value.smallest_batch, largest_batch=value.largest_batch)
    return (gpu, family, precision, compiled), value


def _adjustment(given: Mapping[str, Any]) -> tuple[LinkKey, Adjustment]:
    size, network = (given[name] for name in _LINK)
    _check_types({"vm_size": str, "network": str}, {"vm_size": size, "network": network})
    if lookup_vm_size(size).short_name != size or network not in get_args(NetworkKind):
        raise ValueError(f"nothing is known of {size!a} over {network!a}")
    value = Adjustment(**{name: each for name, each in given.items() if name not in _LINK})
    _check_fields(value)
    _check_factors(**{name: getattr(value, name) for name in _FACTORS})
    for error in (value.error, value.inside_error):
        if error is not None:
            _check_error(error)
    return (size, network), value


def _fit(given: Mapping[str, Any]) -> Fit:
    value = Fit(**given)
    _check_fields(value)
    held_out = {} if value.left_out is None else {"left_out": value.left_out}
    _check_positive(measured=value.measured, before=value.before, after=value.after, naive=value.naive, **held_out)
    return value


def _number(given: Mapping[str, Any]) -> FittedNumber:
    value = FittedNumber(**given)
    _check_fields(value)
    if not (0 <= value.before < math.inf and 0 <= value.after < math.inf):
        raise ValueError(f"{value.what} is {value.after}")
    return value


def _check_fields(value: Any) -> None:
    """Check the fields of a dataclass that are of one type, or of one and None."""
    hints = get_type_hints(type(value))
    _check_types(hints, {each.name: getattr(value, each.name) for each in fields(value)})


def _check_types(kinds: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if get_origin(kinds[name]) is tuple:
            continue
        allowed = get_args(kinds[name]) or (kinds[name],)
        # JSON writes 1.0 as 1, too; but true, which Python counts as 1, is no number.
        if type(value) not in allowed and not (type(value) is int and float in allowed):
            raise ValueError(f"{name} is {value!a}")


def _check_factors(**factors: float) -> None:
    for name, value in factors.items():
        if not 1 / _MOST < value < _MOST:
            raise ValueError(f"{name} is {value}")


def _check_error(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"error is {value}")


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}")
