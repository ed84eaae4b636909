"""Values out of their plain form.

Makes values of standard types, looks functions and classes up by name, and sets fields. It calls none of these
functions, and no `__init__`, `__reduce__`, `__setstate__`, `__del__`, `__hash__` or property of these classes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable
from enum import Enum, Flag
from typing import Any, ClassVar

import numpy as np

from azureml_strategy.checkpoint.plain_kinds import (
    KINDS,
    MAPPINGS,
    PLAIN,
    REFERENCES,
    SEQUENCES,
    Encoded,
    is_fields_only,
    look_up,
    type_name,
)

_KINDS = {kind.name: kind for kind in KINDS.values()}
# Which part of these holds values of any kind, and what it is itself.
_HOLDERS: dict[str, tuple[int | None, type]] = {"deque": (0, list), "defaultdict": (1, dict), "namespace": (None, dict)}


def decode(encoded: Encoded) -> Any:
    """The value that was encoded.

    Raises:
        ValueError: it names what is not there, or asks for what is not done. What was never encoded may raise
            anything.
    """
    return _Decoder().decode(encoded)


class _Decoder:
    def __init__(self) -> None:
        self._seen: list[Any] = []

    def decode(self, encoded: Encoded) -> Any:
        kind, content = encoded
        if kind == "plain":
            return content
        if kind == "again":
            return self._seen[content]
        number = len(self._seen)
        self._seen.append(None)
        self._seen[number] = value = self._new(kind, content)
        return value

    def _new(self, kind: str, content: Any) -> Any:
        if kind in _KINDS:
            return _KINDS[kind].whole(_parts(kind, self.decode(content)))
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

    def _reference(self, content: Any) -> Any:
        return look_up(*content)

    def _class(self, encoded: Encoded) -> Any:
        kind = look_up(*encoded[1])
        if not issubclass(type(kind), type):
            raise ValueError(f"{'.'.join(encoded[1])} is no class")
        return kind

    def _partial(self, content: Any) -> Any:
        function, arguments, keywords = (self.decode(each) for each in content)
        if type(function) not in (*REFERENCES, functools.partial) and not issubclass(type(function), type):
            raise ValueError("a partial of what is no function")
        return functools.partial(function, *_exactly(tuple, arguments), **_exactly(dict, keywords))

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
        return tuple.__new__(kind, _exactly(tuple, self.decode(content[1])))

    def _numpy_array(self, content: Any) -> Any:
        descriptor, shape, data = content
        dtype = np.lib.format.descr_to_dtype(descriptor)
        if dtype.hasobject:
            raise ValueError("addresses of objects as numbers")
        return np.ndarray(shape, dtype, data.numpy().tobytes()).copy()

    def _numpy_objects(self, content: Any) -> Any:
        shape, items = content[0], _exactly(list, self.decode(content[1]))
        array = np.empty(len(items), dtype=object)
        for i, each in enumerate(items):  # numpy would look into lists
            array[i] = each
        return array.reshape(shape)

    def _numpy_scalar(self, content: Any) -> Any:
        return _exactly(np.ndarray, self.decode(content))[()]

    def _numpy_dtype(self, content: Any) -> Any:
        return np.lib.format.descr_to_dtype(content)

    def _config(self, content: Any) -> Any:
        from omegaconf import OmegaConf

        nodes = [OmegaConf.create(self.decode(content[0]), flags={"allow_objects": True})]
        for key in self.decode(content[1]):
            nodes.append(nodes[-1]._get_node(key))  # not resolved: no resolver runs
        for node, flags in zip(nodes, content[2], strict=True):
            node._metadata.flags = dict(flags)
        nodes[0]._invalidate_flags_cache()  # and that of all below
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
            else:  # past `__setattr__`, and properties of this name
                object.__getattribute__(value, "__dict__")[name] = self.decode(encoded)
        return value

    _OTHERS: ClassVar[dict[str, Callable[[_Decoder, Any], Any]]] = {
        "reference": _reference,
        "partial": _partial,
        "enum": _enum,
        "named tuple": _named_tuple,
        "numpy array": _numpy_array,
        "numpy objects": _numpy_objects,
        "numpy scalar": _numpy_scalar,
        "numpy dtype": _numpy_dtype,
        "config": _config,
        "object": _object,
    }


def _exactly(kind: type, value: Any) -> Any:
    """An object of another class could answer with code of its own."""
    if type(value) is not kind:
        raise ValueError(f"a {type_name(type(value))} in the place of a {type_name(kind)}")
    return value


def _parts(name: str, parts: Any) -> Any:
    """What a value is made of, if nothing in it has code of its own that making it would run."""
    if name in _HOLDERS:
        index, kind = _HOLDERS[name]
        _exactly(kind, parts if index is None else _exactly(tuple, parts)[index])
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
    """Refuse keys that would run a `__hash__` of their own."""
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
