"""Values that torch's weights-only unpickler refuses, written as values that it takes.

An encoded value is a list of a kind and what belongs to it: `["frozenset", [...]]`. What torch takes as it is stays as
it is, in `["plain", value]`; tensors among it, however large, are neither copied nor looked into.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, Flag
from typing import Any

import numpy as np
import torch
from torch import Tensor

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

_CONTAINERS = {kind: name for name, kind in (SEQUENCES | MAPPINGS).items()}
# The unpickler's longest whole number has 255 bytes.
_LONGEST_BITS = 255 * 8 - 1


class NotEncodableError(TypeError):
    """A value that has no plain form.

    Attributes:
        place: the keys, indices and fields that lead to it.
        reason: what it is, and why it cannot be written.
    """

    def __init__(self, place: Sequence[str], reason: str) -> None:
        super().__init__(f"{' → '.join(place)}: {reason}")
        self.place = tuple(place)
        self.reason = reason


def is_plain(value: Any) -> bool:
    """Whether torch's weights-only unpickler takes a value as it is.

    Args:
        value: of any type; one that was registered with `torch.serialization.add_safe_globals` is tried.
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
            return True  # it is being looked at
        seen.add(id(value))
        items = (*value.keys(), *value.values()) if issubclass(kind, dict) else value
        return all(_is_plain(each, seen) for each in items)
    return (issubclass(kind, Tensor) or kind in torch.serialization.get_safe_globals()) and _loads(value)


def _loads(value: Any) -> bool:
    """Try it: a type alone does not say whether its fields are taken."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # whatever a type of the user's raises, it cannot be loaded
        return False
    return True


def encode(value: Any, place: Sequence[str] = ()) -> Encoded:
    """A value in plain form; an object that occurs twice in it is one object again after `decode`.

    Args:
        value: to write.
        place: where it lies, for errors.

    Raises:
        NotEncodableError: it, or something in it, has no such form.
    """
    return _Encoder().encode(value, tuple(place))


class _Encoder:
    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, Any]] = {}  # with the object, so that no other one gets its id
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
            return ["enum", [self._reference(kind, place), _member_names(value)]]
        if isinstance(value, (np.generic, np.dtype, np.ndarray)):
            return self._numpy(value, place)
        if isinstance(value, (type, *REFERENCES)):
            return self._reference(value, place)
        if kind is functools.partial or (issubclass(kind, functools.partial) and kind.__module__.startswith("hydra.")):
            # Hydra's, of `_partial_: true`, checks what a configuration may call. One that was read back does not.
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
        # as a tensor, which torch.save does not write as text
        content = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        return ["numpy array", [np.lib.format.dtype_to_descr(value.dtype), list(value.shape), content]]

    def _reference(self, value: Any, place: tuple[str, ...]) -> Encoded:
        names = dict.fromkeys((getattr(value, "__qualname__", value.__name__), value.__name__))
        for name in names:  # some of torch's have a qualified name that leads nowhere
            module = pickle.whichmodule(value, name)  # type: ignore[attr-defined] # which typeshed forgets
            with suppress(ValueError):
                if look_up(module, name) is value:
                    return ["reference", [module, name]]
        what = f"{value.__module__}.{next(iter(names))}, which is not found under this name in its module"
        raise NotEncodableError(place, f"{what}: a function or class has to be at the top of one")

    def _config(self, value: Any, place: tuple[str, ...]) -> Encoded:
        """OmegaConf's, as a part of the whole: its interpolations may lead out of it."""
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
        except Exception as error:  # whatever the class raises, it says that it cannot be written
            raise NotEncodableError(place, f"a {type_name(kind)} ({error})") from error
        make, arguments, state, items = reduced[0], reduced[1], (*reduced, None)[2], reduced[3:]
        made = make is copyreg.__newobj__ and arguments == (kind,)  # type: ignore[attr-defined]
        fields = _fields(kind, state)
        if not made or any(each is not None for each in items) or fields is None:
            raise NotEncodableError(place, f"a {type_name(kind)}, which is more than its fields")
        reference = self._reference(kind, place)
        return ["object", [reference, [[name, self.encode(each, (*place, name))] for name, each in fields.items()]]]


def _fields(kind: type, state: Any) -> dict[str, Any] | None:
    """What pickle would set, by name."""
    if type(state) is list and dataclasses.is_dataclass(kind):  # frozen with slots
        return dict(zip((each.name for each in dataclasses.fields(kind)), state, strict=True))
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    if any(type(each) not in (dict, type(None)) for each in parts):
        return None
    return {name: value for each in parts for name, value in (each or {}).items()}


def _member_names(value: Enum) -> list[str]:
    """Its name, or those of the flags that it joins."""
    if value.name in type(value).__members__ or not isinstance(value, Flag):
        return [value.name]
    return [name for name, each in type(value).__members__.items() if each.value and each in value]
