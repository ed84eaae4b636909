"""Which kinds of values have a plain form, and which functions and classes a checkpoint may name."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import inspect
import itertools
import random
import re
import sys
import types
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from operator import attrgetter
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Encoded = list[Any]
"""The name of a kind, and its content."""
PLAIN = frozenset((type(None), bool, float, complex, str, bytes, bytearray, nn.Parameter, Tensor))
PLAIN |= {torch.Size, torch.device, torch.dtype, torch.layout}
"""Types that torch's weights-only unpickler takes with any value. An `int` it takes only up to a size."""
# How many values of a run, and of one container, are searched for functions and classes. A list of samples may have
# millions of values, which must not use up the search.
_MOST_VALUES, _MOST_OF_ONE = 100_000, 1_000
# Objects of these libraries are not searched: they refer to the whole Trainer, and their classes are not the user's.
_NOT_ENTERED = ("lightning", "pytorch_lightning", "torch", "azureml_strategy")
# Types whose objects hold others of the same type; torch's own are searched too.
_TREES = (nn.Module, LRScheduler)
_FUNCTIONS = frozenset((abs, len, max, min, round, sum))
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS: dict[str, type] = {"dict": dict, "ordered dict": OrderedDict, "counter": Counter}
REFERENCES = (types.FunctionType, types.BuiltinFunctionType, np.ufunc)
"""Types of values that are written by name, as classes are."""
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
        parts: takes a value apart. The parts may hold values of other kinds.
        whole: makes a value from its parts. It runs only code of the standard library, numpy and torch.
    """

    name: str
    parts: Callable[[Any], Any]
    whole: Callable[[Any], Any]


_BIT_GENERATORS: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
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


# Each takes the parts of a value out of its attributes.
_date_parts = attrgetter("year", "month", "day")
_time_parts = attrgetter("hour", "minute", "second", "microsecond", "tzinfo")
_range_parts = attrgetter("start", "stop", "step")


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
    timedelta: Kind("timedelta", attrgetter("days", "seconds", "microseconds"), _of(timedelta)),
    timezone: Kind("timezone", lambda value: value.__getinitargs__(), _of(timezone)),
    ZoneInfo: Kind("zone", attrgetter("key"), _zone),
    Decimal: Kind("decimal", str, Decimal),
    Fraction: Kind("fraction", attrgetter("numerator", "denominator"), _of(Fraction)),
    uuid.UUID: Kind("uuid", attrgetter("hex"), uuid.UUID),
    re.Pattern: Kind("pattern", attrgetter("pattern", "flags"), _of(re.compile)),
    deque: Kind("deque", lambda value: (list(value), value.maxlen), _of(deque)),
    defaultdict: Kind("defaultdict", lambda value: (value.default_factory, dict(value)), _of(defaultdict)),
    types.SimpleNamespace: Kind(
        "namespace", lambda value: dict(vars(value)), lambda fields: types.SimpleNamespace(**fields)
    ),
    random.Random: Kind("random", random.Random.getstate, _python_random),
    np.random.Generator: Kind(
        "numpy generator", attrgetter("bit_generator.state"), lambda state: np.random.Generator(_bit_generator(state))
    ),
    np.random.RandomState: Kind("numpy random state", lambda value: value.get_state(legacy=False), _numpy_random_state),
    torch.Generator: Kind(
        "torch generator", lambda value: (str(value.device), value.get_state()), _of(_torch_generator)
    ),
}
_CLASSES = frozenset(
    (*PLAIN, *KINDS, list, tuple, dict, set, frozenset, OrderedDict, Counter, deque, object, Namespace)
)
# Methods that only make, show, compare and copy. A class with other special methods may do anything when it is used.
_OF_DATA = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "post_init", "init_subclass", "class_getitem", "subclasshook", "replace", "getnewargs"),
        *("repr", "str", "format", "eq", "ne", "lt", "le", "gt", "ge", "hash", "setattr", "delattr"),
        *("annotate_func", "annotate"),  # on Python 3.14
    )
)


class NameRefusedError(ValueError):
    """A file names a function or class that it may not name. The message says what to type."""

    def __init__(self, module: str, name: str, why: str = "") -> None:
        place = f"{module}.{name}"
        super().__init__(
            f"the file names {place}, {why or 'which nothing in this run holds'}. What is called on the word of a file "
            "runs what its writer has chosen. If you trust whoever wrote it, type "
            f"torch.serialization.add_safe_globals([{place}]) before the fit, or trainer.fit(..., weights_only=False); "
            "of a function that reads a file, the argument is trust_pickles=True"
        )


class Names:
    """Finds the functions and classes that a checkpoint names, and refuses those that it may not name.

    Args:
        run: objects that exist already, such as the module, the data module and the callbacks. Functions and classes
            that they hold may be named, and so may those of torch's that only compute.
        trusted: take any function and any class.
        imports: import the modules of trusted names. Without it, only imported modules count.
    """

    def __init__(self, run: Collection[object] = (), *, trusted: bool = False, imports: bool = True) -> None:
        self._trusted, self._imports = trusted, imports
        held = [] if trusted else list(_values(run))
        self._held = {id(each): each for each in held}
        self._partials = [each for each in held if isinstance(each, functools.partial)]
        self._modules = {type(each).__module__ for each in run if _is_entered(type(each))}

    def look_up(self, module: str, name: str) -> Any:
        """Find a function or class.

        Raises:
            NameRefusedError: it may not be named.
            ValueError: there is none of this name.
        """
        found = self._found(module, name)
        if not (self._trusted or id(found) in self._held or _is_harmless(found)):
            raise NameRefusedError(module, name)
        return found

    def data_class(self, module: str, name: str) -> type:
        """Find a class whose object is made by its fields, or whose member is taken.

        Classes that only hold data are accepted, and those in the modules of the run's own classes.

        Raises:
            NameRefusedError: it may not be named.
            ValueError: there is none of this name, or it is no class.
        """
        found = self._found(module, name)
        if not issubclass(type(found), type):
            raise ValueError(f"{module}.{name} is no class")
        known = self._trusted or id(found) in self._held or _is_harmless(found)
        if not (known or found.__module__ in self._modules or _holds_data_only(found)):
            raise NameRefusedError(module, name)
        return found  # type: ignore[no-any-return]

    def partial(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Make a partial. If its function is the user's, the run must hold a partial with the same arguments.

        Raises:
            NameRefusedError: it may not be made.
        """
        made = functools.partial(function, *arguments, **keywords)
        if self._trusted or _is_harmless(made.func):
            return made
        held = next((each for each in self._partials if _same(each, made)), None)
        if held is None:
            what = made.func
            raise NameRefusedError(what.__module__, what.__qualname__, "with arguments that no partial of this run has")
        return held

    def _found(self, module: str, name: str) -> Any:
        if not all(type(each) is str for each in (module, name)):
            raise ValueError("a name that is no text")
        if self._trusted and self._imports:
            return look_up(module, name)
        if module not in sys.modules:
            raise NameRefusedError(module, name, "of a module that this run has not imported")
        found = _without_code(module, name)
        if type(found) not in REFERENCES and not issubclass(type(found), type):
            raise ValueError(f"{module}.{name} is neither a function nor a class")
        return found


def _without_code(module: str, name: str) -> Any:
    """What a name refers to, found without a call of `__getattr__` or a property."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        try:
            found = inspect.getattr_static(found, part)
        except AttributeError as error:
            raise ValueError(f"{module}.{name} is not there: {error}") from error
        found = found.__func__ if type(found) is staticmethod else found
    return found


def _is_harmless(found: Any) -> bool:
    """Whether calling it only computes, with any arguments, or the user has registered it with torch."""
    if any(found is (each[0] if type(each) is tuple else each) for each in torch.serialization.get_safe_globals()):
        return True
    if not isinstance(found, type):
        return type(found) is np.ufunc or found in _FUNCTIONS | _torchs_functions() or found.__module__ == "math"
    if issubclass(found, (nn.Module, Optimizer, LRScheduler)):
        return found.__module__.startswith(("torch.nn.modules.", "torch.optim."))
    is_numpys = issubclass(found, (np.generic, np.dtype)) and found.__module__.startswith("numpy")
    return found in _CLASSES or is_numpys


@functools.cache
def _torchs_functions() -> frozenset[Any]:
    """Functions of torch's that compute with tensors: those that a subclass of Tensor may replace."""
    places = (torch, torch.functional, torch.nn.functional, torch.linalg, torch.fft, torch.special)
    known = torch.overrides.get_overridable_functions()
    return frozenset(each for place in places for each in known.get(place, ()))


def _holds_data_only(kind: type) -> bool:
    """Whether a class is an enum, a data class or a named tuple, and has no methods that the interpreter calls."""
    if not (dataclasses.is_dataclass(kind) or issubclass(kind, Enum) or hasattr(kind, "_fields")):
        return False
    own = [each for each in kind.__mro__ if each.__module__ not in ("builtins", "enum", "typing", "abc")]
    special = {
        name
        for each in own
        for name, value in vars(each).items()
        if name.startswith("__") and name.endswith("__") and callable(value)
    }
    makers = ("dataclasses", "enum")  # the latter copies the operators of flags into each class
    generated = {name for name in special if getattr(getattr(kind, name), "__module__", None) in makers}
    return special - generated - {"__class__"} <= _OF_DATA


def _same(held: functools.partial[Any], made: functools.partial[Any]) -> bool:
    if held.func is not made.func:
        return False
    return repr((held.args, held.keywords)) == repr((made.args, made.keywords))  # a text is enough: `held` is taken


def _values(run: Iterable[object]) -> Iterator[Any]:
    """The functions, classes and partials that objects hold, and the classes of what they hold."""
    left: deque[Any] = deque(value for each in run for value in _fields(each))
    seen: set[int] = set()
    while left and len(seen) < _MOST_VALUES:
        each = left.popleft()
        kind = type(each)
        if id(each) in seen or kind in PLAIN or kind in (int, np.ndarray):
            continue
        seen.add(id(each))
        if isinstance(each, (type, *REFERENCES)):
            yield each
        elif isinstance(each, functools.partial):
            yield each
            left += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, dict):
            left += itertools.islice(itertools.chain.from_iterable(each.items()), 2 * _MOST_OF_ONE)
        elif isinstance(each, (list, tuple, set, frozenset, deque)):
            left += itertools.islice(each, _MOST_OF_ONE)
            yield from () if kind.__module__ == "builtins" else (kind,)
        elif isinstance(each, _TREES):  # torch's own, such as a Sequential, hold those of users
            yield from (kind,) if _is_entered(kind) else ()
            left += _fields(each)
        elif isinstance(each, Enum) or (is_fields_only(kind) and _is_entered(kind) and not isinstance(each, Tensor)):
            yield kind
            left += _fields(each)


def _is_entered(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _NOT_ENTERED


def _fields(value: Any) -> list[Any]:
    """The values of an object's own fields, those in slots as well, found without code of its class."""
    slots = [
        slot
        for each in type(value).__mro__
        for slot in vars(each).values()
        if type(slot) is types.MemberDescriptorType and each.__module__ != builtins.__name__
    ]
    found: list[Any] = []
    for slot in slots:
        try:
            found.append(slot.__get__(value))
        except AttributeError:  # never set
            continue
    own = getattr(value, "__dict__", None)
    return [*found, *(own.values() if type(own) is dict else ())]
