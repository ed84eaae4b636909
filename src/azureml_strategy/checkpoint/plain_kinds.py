"""The kinds of values that have a plain form.

Standard types are kept by their parts, functions and classes by name, other objects by their fields. The
encoder and the decoder in `plain_coding` share these rules, so that exactly what is written can be read.
"""

from __future__ import annotations

import functools
import importlib
import random
import re
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch import Tensor, nn

Encoded = list[Any]
"""The name of a kind, and its content."""

PLAIN = frozenset((type(None), bool, float, complex, str, bytes, bytearray, nn.Parameter, Tensor))
"""Types that torch's weights-only unpickler takes with any value. `int` is not one: it depends on the value."""
PLAIN |= {torch.Size, torch.device, torch.dtype, torch.layout}
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS: dict[str, type] = {"dict": dict, "ordered dict": OrderedDict, "counter": Counter}
REFERENCES = (types.FunctionType, types.BuiltinFunctionType, np.ufunc)
"""Types of values that are kept by name, besides classes."""
# Methods of a class that pickle or the interpreter would call when an object is made or deleted.
_HOOKS = ("__reduce__", "__reduce_ex__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "__del__")


def look_up(module: str, name: str) -> Any:
    """Find a function or class by its name. Other objects are refused, because their attributes could be anything.

    Raises:
        ValueError: there is no function or class of this name.
    """
    try:
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{module}.{name} is not there: {error}") from error
    if type(found) not in REFERENCES and not issubclass(type(found), type):
        raise ValueError(f"{module}.{name} is neither a function nor a class")
    return found


def is_fields_only(kind: type) -> bool:
    """Whether objects of a class are only their fields, and making or deleting one runs no code of the class."""
    own = [name for name in _HOOKS if getattr(kind, name, None) is not getattr(object, name, None)]
    generated = getattr(getattr(kind, "__setstate__", None), "__module__", None) == "dataclasses"
    return own == (["__setstate__"] if generated else []) and not issubclass(kind, (type, types.ModuleType))


def type_name(kind: type) -> str:
    """The name of a type, for messages."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class Kind:
    """A type whose values are made of a few parts.

    Args:
        name: the name in a file.
        parts: takes a value apart; the parts may hold values of other kinds.
        whole: makes a value from its parts. It runs only code of the standard library, numpy and torch.
    """

    name: str
    parts: Callable[[Any], Any]
    whole: Callable[[Any], Any]


_BIT_GENERATORS: dict[str, Callable[[], Any]] = {
    "PCG64": np.random.PCG64,
    "PCG64DXSM": np.random.PCG64DXSM,
    "MT19937": np.random.MT19937,
    "Philox": np.random.Philox,
    "SFC64": np.random.SFC64,
}


def _bit_generator(state: Any) -> Any:
    made = _BIT_GENERATORS[state["bit_generator"]]()
    made.state = {name: value for name, value in state.items() if name not in ("has_gauss", "gauss")}
    return made


def _numpy_random_state(state: Any) -> np.random.RandomState:
    made = np.random.RandomState(_bit_generator(state))
    made.set_state(state)
    return made


def _python_random(state: Any) -> random.Random:
    made = random.Random()
    made.setstate(state)
    return made


def _torch_generator(device: str, state: Tensor) -> torch.Generator:
    made = torch.Generator(device)
    made.set_state(state)
    return made


def _date_parts(value: date) -> tuple[Any, ...]:
    return value.year, value.month, value.day


def _time_parts(value: Any) -> tuple[Any, ...]:
    return value.hour, value.minute, value.second, value.microsecond, value.tzinfo


def _range_parts(value: Any) -> tuple[Any, ...]:
    return value.start, value.stop, value.step


def _zone(key: str | None) -> ZoneInfo:
    if key is None:
        raise ValueError("a time zone without a name")
    return ZoneInfo(key)


def _of(make: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda parts: make(*parts)


KINDS: dict[type, Kind] = {
    PosixPath: Kind("path", str, Path),
    WindowsPath: Kind("windows path", str, Path),
    PurePosixPath: Kind("pure posix path", str, PurePosixPath),
    PureWindowsPath: Kind("pure windows path", str, PureWindowsPath),
    int: Kind("int", hex, lambda text: int(text, 16)),  # only for integers that are too long for torch's unpickler
    range: Kind("range", _range_parts, _of(range)),
    slice: Kind("slice", _range_parts, _of(slice)),
    date: Kind("date", _date_parts, _of(date)),
    datetime: Kind(
        "datetime",
        lambda value: ((*_date_parts(value), *_time_parts(value)), value.fold),
        lambda parts: datetime(*parts[0]).replace(fold=parts[1]),
    ),
    time: Kind(
        "time", lambda value: (_time_parts(value), value.fold), lambda parts: time(*parts[0]).replace(fold=parts[1])
    ),
    timedelta: Kind("timedelta", lambda value: (value.days, value.seconds, value.microseconds), _of(timedelta)),
    timezone: Kind("timezone", lambda value: value.__getinitargs__(), _of(timezone)),
    ZoneInfo: Kind("zone", lambda value: value.key, _zone),
    Decimal: Kind("decimal", str, Decimal),
    Fraction: Kind("fraction", lambda value: (value.numerator, value.denominator), _of(Fraction)),
    uuid.UUID: Kind("uuid", lambda value: value.hex, uuid.UUID),
    re.Pattern: Kind("pattern", lambda value: (value.pattern, value.flags), _of(re.compile)),
    deque: Kind("deque", lambda value: (list(value), value.maxlen), _of(deque)),
    defaultdict: Kind("defaultdict", lambda value: (value.default_factory, dict(value)), _of(defaultdict)),
    types.SimpleNamespace: Kind(
        "namespace", lambda value: dict(vars(value)), lambda fields: types.SimpleNamespace(**fields)
    ),
    random.Random: Kind("random", random.Random.getstate, _python_random),
    np.random.Generator: Kind(
        "numpy generator",
        lambda value: value.bit_generator.state,
        lambda state: np.random.Generator(_bit_generator(state)),
    ),
    np.random.RandomState: Kind("numpy random state", lambda value: value.get_state(legacy=False), _numpy_random_state),
    torch.Generator: Kind(
        "torch generator", lambda value: (str(value.device), value.get_state()), _of(_torch_generator)
    ),
}
