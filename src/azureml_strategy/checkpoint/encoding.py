"""Encode values in plain form, and decode them.

Plain form is made of tensors, numbers, strings and lists. A value that torch's weights-only unpickler would refuse
becomes a list with the name of its kind and its parts. Decoding runs no code that a file brings along.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import inspect
import io
import math
import operator
import pickle
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum, Flag
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from azureml_strategy.checkpoint.allowed_types import (
    KINDS,
    MAPPINGS,
    PLAIN,
    REFERENCES,
    SEQUENCES,
    Encoded,
    Names,
    is_fields_only,
    look_up,
    type_name,
)

_CONTAINERS = {kind: name for name, kind in (SEQUENCES | MAPPINGS).items()}
# The longest integer that torch's weights-only unpickler takes has 255 bytes.
_LONGEST_BITS = 255 * 8 - 1
# `require_decodable` makes no larger array. The arrays of a random generator are smaller.
_CHECKED_BYTES = 1 << 20
_KINDS = {kind.name: kind for kind in KINDS.values()}
# Kinds that may hold values of any kind: the index of the part that holds them, None for the whole; and its type.
_HOLDERS: dict[str, tuple[int | None, type]] = {"deque": (0, list), "defaultdict": (1, dict), "namespace": (None, dict)}


class NotEncodableError(TypeError):
    """A value that has no plain form: the keys, indices and fields that lead to it, and why it cannot be written."""

    def __init__(self, place: Sequence[str], reason: str) -> None:
        super().__init__(f"{' → '.join(place)}: {reason}")
        self.place = tuple(place)
        self.reason = reason


def is_plain(value: Any) -> bool:
    """Whether torch's weights-only unpickler takes a value as it is.

    Tensors of a subclass, and types that were registered with `torch.serialization.add_safe_globals`, are saved and
    loaded on trial.
    """
    return _is_plain(value, set())


def _is_plain(value: Any, seen: set[int]) -> bool:
    kind = type(value)
    if kind in PLAIN:
        return True
    if kind is int:
        return bool(value.bit_length() <= _LONGEST_BITS)
    if kind in (list, tuple, set, dict, OrderedDict, Counter):
        if id(value) in seen:
            return True  # already checked, or being checked
        seen.add(id(value))
        items = (*value.keys(), *value.values()) if issubclass(kind, dict) else value
        return all(_is_plain(each, seen) for each in items)
    if not issubclass(kind, Tensor) and kind not in torch.serialization.get_safe_globals():
        return False
    file = io.BytesIO()  # on trial: the type alone does not say whether torch takes the fields
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # whatever a user's type raises, the value cannot be loaded
        return False
    return True


def encode(value: Any, place: Sequence[str] = ()) -> Encoded:
    """Encode a value in plain form. An object that occurs twice in it is one object again after `decode`.

    The place, for errors, is made of the keys, indices and fields that lead to the value.

    Raises:
        NotEncodableError: the value, or something in it, has no plain form.
    """
    return _Encoder().encode(value, tuple(place))


class _Encoder:
    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, Any]] = {}  # holds each object, so that no other one gets its id
        self._open: set[int] = set()

    def encode(self, value: Any, place: tuple[str, ...]) -> Encoded:
        if is_plain(value):
            return ["plain", value]
        if id(value) in self._open:
            raise NotEncodableError(place, f"a {type_name(type(value))} that contains itself")
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)][0]]
        self._numbers[id(value)] = len(self._numbers), value
        self._open.add(id(value))
        encoded = self._new(value, place)
        self._open.remove(id(value))
        return encoded

    def _new(self, value: Any, place: tuple[str, ...]) -> Encoded:
        kind = type(value)
        if kind in _CONTAINERS:
            return self._container(value, place)
        if kind in KINDS:
            return [KINDS[kind].name, self.encode(KINDS[kind].parts(value), place)]
        if isinstance(value, Enum):
            names = [value.name]
            if isinstance(value, Flag) and value.name not in kind.__members__:  # a combination of flags
                names = [name for name, each in kind.__members__.items() if each.value and each in value]
            return ["enum", [self._reference(kind, place), names]]
        if isinstance(value, (np.generic, np.dtype, np.ndarray)):
            return self._numpy(value, place)
        if isinstance(value, (type, *REFERENCES)):
            return self._reference(value, place)
        if kind is functools.partial or (issubclass(kind, functools.partial) and kind.__module__.startswith("hydra.")):
            # Hydra's partial, of `_partial_: true`, checks what a configuration may call. The decoded partial does not.
            parts = (value.func, value.args, value.keywords)
            return ["partial", [self.encode(each, (*place, "partial")) for each in parts]]
        if kind.__module__.startswith("omegaconf."):
            return self._config(value, place)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return ["named tuple", [self._reference(kind, place), self.encode(tuple(value), place)]]
        return self._object(value, place)

    def _container(self, value: Any, place: tuple[str, ...]) -> Encoded:
        name = _CONTAINERS[type(value)]
        if name in SEQUENCES:
            return [name, [self.encode(each, (*place, f"[{i}]")) for i, each in enumerate(value)]]
        return [name, [[self.encode(key, place), self.encode(each, (*place, str(key)))] for key, each in value.items()]]

    def _numpy(self, value: Any, place: tuple[str, ...]) -> Encoded:
        if isinstance(value, np.dtype):
            return ["numpy dtype", np.lib.format.dtype_to_descr(value)]
        if isinstance(value, np.generic):
            return ["numpy scalar", self.encode(np.asarray(value), place)]
        if value.dtype == object:
            return ["numpy objects", [list(value.shape), self.encode(value.ravel().tolist(), place)]]
        if type(value) is not np.ndarray or value.dtype.hasobject:
            raise NotEncodableError(place, f"a {type_name(type(value))} of {value.dtype}")
        # The content is a tensor, because torch.save would write bytes as text.
        content = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        return ["numpy array", [np.lib.format.dtype_to_descr(value.dtype), list(value.shape), content]]

    def _reference(self, value: Any, place: tuple[str, ...]) -> Encoded:
        names = dict.fromkeys((getattr(value, "__qualname__", value.__name__), value.__name__))
        for name in names:  # nothing is found under the qualified names of some of torch's functions
            module = pickle.whichmodule(value, name)  # type: ignore[attr-defined] # missing in typeshed
            with suppress(ValueError):
                if look_up(module, name) is value:
                    return ["reference", [module, name]]
        what = f"{value.__module__}.{next(iter(names))}, which is not found under this name in its module"
        raise NotEncodableError(place, f"{what}: a function or class has to be at the top of one")

    def _config(self, value: Any, place: tuple[str, ...]) -> Encoded:
        """Encode the whole configuration and the path to this part: interpolations in it may refer to other parts."""
        from omegaconf import DictConfig, ListConfig, OmegaConf

        if type(value) not in (DictConfig, ListConfig):
            raise NotEncodableError(place, f"a {type_name(type(value))}")
        nodes = [value]
        while nodes[0]._get_parent() is not None:
            nodes.insert(0, nodes[0]._get_parent())
        content = OmegaConf.to_container(nodes[0], resolve=False)
        keys = [each._key() for each in nodes[1:]]
        flags = [dict(each._metadata.flags or {}) for each in nodes]
        return ["config", [self.encode(content, place), self.encode(keys, place), flags]]

    def _object(self, value: Any, place: tuple[str, ...]) -> Encoded:
        kind = type(value)
        if not is_fields_only(kind):
            raise NotEncodableError(place, f"a {type_name(kind)}, which says itself how it is pickled")
        try:
            reduced: Any = value.__reduce_ex__(2)
        except Exception as error:  # the class refuses to be pickled, with any exception
            raise NotEncodableError(place, f"a {type_name(kind)} ({error})") from error
        make, arguments, state, items = reduced[0], reduced[1], (*reduced, None)[2], reduced[3:]
        made = make is copyreg.__newobj__ and arguments == (kind,)  # type: ignore[attr-defined]
        fields = _fields(kind, state)
        if not made or any(each is not None for each in items) or fields is None:
            raise NotEncodableError(place, f"a {type_name(kind)}, which is more than its fields")
        reference = self._reference(kind, place)
        return ["object", [reference, [[name, self.encode(each, (*place, name))] for name, each in fields.items()]]]


def _fields(kind: type, state: Any) -> dict[str, Any] | None:
    """The fields that pickle would set, by name; None if the state is not made of fields."""
    if type(state) is list and dataclasses.is_dataclass(kind):  # a frozen dataclass with slots
        return dict(zip((each.name for each in dataclasses.fields(kind)), state, strict=True))
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    if any(type(each) not in (dict, type(None)) for each in parts):
        return None
    return {name: value for each in parts for name, value in (each or {}).items()}


def decode(encoded: Encoded, names: Names | None = None) -> Any:
    """Restore a value from the plain form that `encode` made, which by default may name only what can do no harm.

    Raises:
        NameRefusedError: the plain form names a function or class that it may not name.
        ValueError: the plain form names something that does not exist, or asks for something that is not allowed. Data
            that `encode` did not make may raise any exception.
    """
    return _Decoder(names or Names()).decode(encoded)


def require_decodable(encoded: Encoded, names: Names) -> None:
    """Raise what `decode` would raise, without a copy of large arrays."""
    _Decoder(names, _CHECKED_BYTES).decode(encoded)


class _Decoder:
    def __init__(self, names: Names, largest: float = math.inf) -> None:
        self._names, self._largest = names, largest
        self._made: list[Any] = []

    def decode(self, encoded: Encoded) -> Any:
        kind, content = encoded
        if kind == "plain":
            return content
        if kind == "again":
            return self._made[content]
        number = len(self._made)  # a value is counted before its parts, as in the encoder
        self._made.append(None)
        self._made[number] = value = self._new(kind, content)
        return value

    def _new(self, kind: str, content: Any) -> Any:
        if kind in _KINDS:
            return _KINDS[kind].whole(_require_plain_parts(kind, self.decode(content)))
        if kind in SEQUENCES:
            items = [self.decode(each) for each in content]
            _require_hashable(items if kind in ("set", "frozenset") else ())
            return SEQUENCES[kind](items)
        if kind in MAPPINGS:
            pairs = [(self.decode(key), self.decode(each)) for key, each in content]
            _require_hashable(key for key, _ in pairs)
            return MAPPINGS[kind](dict(pairs))
        if kind not in self._OTHERS:
            raise ValueError(f"{kind!r} is no kind of value that is known here")
        return self._OTHERS[kind](self, content)

    def _class(self, encoded: Encoded) -> Any:
        return self._names.data_class(*encoded[1])

    def _partial(self, content: Any) -> Any:
        function, arguments, keywords = (self.decode(each) for each in content)
        if type(function) not in (*REFERENCES, functools.partial) and not issubclass(type(function), type):
            raise ValueError("a partial of what is no function")
        return self._names.partial(function, _require_type(tuple, arguments), _require_type(dict, keywords))

    def _enum(self, content: Any) -> Any:
        kind = self._class(content[0])
        if not issubclass(kind, Enum):
            raise ValueError(f"{type_name(kind)} is no Enum")
        members = [kind.__members__[name] for name in content[1]]
        if len(members) == 1 or not issubclass(kind, Flag):
            return members[0]
        return functools.reduce(operator.or_, members, kind(0))

    def _named_tuple(self, content: Any) -> Any:
        kind = self._class(content[0])
        if not issubclass(kind, tuple):
            raise ValueError(f"{type_name(kind)} is no tuple")
        return tuple.__new__(kind, _require_type(tuple, self.decode(content[1])))

    def _numpy_array(self, content: Any) -> Any:
        descriptor, shape, data = content
        dtype = np.lib.format.descr_to_dtype(descriptor)
        if dtype.hasobject:
            raise ValueError("addresses of objects as numbers")
        if data.numel() > self._largest:
            return np.empty(0, dtype)
        return np.ndarray(shape, dtype, data.numpy().tobytes()).copy()

    def _numpy_objects(self, content: Any) -> Any:
        shape, items = content[0], _require_type(list, self.decode(content[1]))
        array = np.empty(len(items), dtype=object)
        for i, each in enumerate(items):  # numpy would turn lists into further dimensions
            array[i] = each
        return array.reshape(shape)

    def _config(self, content: Any) -> Any:
        from omegaconf import OmegaConf

        nodes = [OmegaConf.create(self.decode(content[0]), flags={"allow_objects": True})]
        for key in self.decode(content[1]):
            nodes.append(nodes[-1]._get_node(key))  # resolves no interpolation, so no resolver runs
        for node, flags in zip(nodes, content[2], strict=True):
            node._metadata.flags = dict(flags)
        nodes[0]._invalidate_flags_cache()  # also clears the caches of all nodes below
        return nodes[-1]

    def _object(self, content: Any) -> Any:
        kind = self._class(content[0])
        if not is_fields_only(kind):
            raise ValueError(f"{type_name(kind)} says itself how it is made")
        value = object.__new__(kind)
        for name, encoded in content[1]:
            slot = inspect.getattr_static(kind, name, None)
            if type(slot) is types.MemberDescriptorType:
                slot.__set__(value, self.decode(encoded))
            else:  # neither `__setattr__` nor a property of this name is called
                object.__getattribute__(value, "__dict__")[name] = self.decode(encoded)
        return value

    _OTHERS: ClassVar[dict[str, Callable[[_Decoder, Any], Any]]] = {
        "reference": lambda decoder, content: decoder._names.look_up(*content),
        "partial": _partial,
        "enum": _enum,
        "named tuple": _named_tuple,
        "numpy array": _numpy_array,
        "numpy objects": _numpy_objects,
        "numpy scalar": lambda decoder, content: _require_type(np.ndarray, decoder.decode(content))[()],
        "numpy dtype": lambda decoder, content: np.lib.format.descr_to_dtype(content),
        "config": _config,
        "object": _object,
    }


def _require_type(kind: type, value: Any) -> Any:
    """Require exactly this class. An object of another class could run code of its own."""
    if type(value) is not kind:
        raise ValueError(f"a {type_name(type(value))} in the place of a {type_name(kind)}")
    return value


def _require_plain_parts(name: str, parts: Any) -> Any:
    """Check that no part has code of its own that would run when the value is made, and return the parts."""
    if name in _HOLDERS:
        index, kind = _HOLDERS[name]
        _require_type(kind, parts if index is None else _require_type(tuple, parts)[index])
        return parts
    left = [parts]
    while left:
        each = left.pop()
        if type(each) in (tuple, list, dict):
            left += each.values() if type(each) is dict else each
        elif type(each) not in (*PLAIN, int, np.ndarray) and type(each) not in KINDS:
            raise ValueError(f"a {name} made of a {type_name(type(each))}")
    return parts


def _require_hashable(items: Iterable[Any]) -> None:
    """Refuse set items and dictionary keys that would run a `__hash__` of their own."""
    for each in items:
        kind = type(each)
        if kind is tuple:
            _require_hashable(each)
            continue
        standard = kind in (PLAIN | {int}) or kind in KINDS or issubclass(kind, (Enum, np.generic, np.dtype))
        inherited = any(getattr(kind, "__hash__") is base.__hash__ for base in (object, tuple, frozenset))  # noqa: B009
        generated = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        if not (standard or inherited or generated):
            raise ValueError(f"a {type_name(kind)}, which has a __hash__ of its own, as a key")
