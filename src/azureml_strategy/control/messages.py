"""Encodes the messages that ranks exchange through the rendezvous store as JSON.

Anyone who reaches the store's port can write into it, and loading a pickle runs code. So nothing from the store is ever
unpickled. Messages may contain plain values, torch constants, and objects of registered classes, by their fields.
"""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import Any

import torch

# Registered classes by name; see `register`.
_CLASSES: dict[str, type] = {}
# torch's constants, such as torch.float32, by their names.
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def register(*classes: type) -> None:
    """Allow objects of these classes in messages: enumerations, and data classes of plain values and such objects.

    Raises:
        ValueError: another class of the same name is registered; messages tell classes apart by name alone.
    """
    for each in classes:
        known = _CLASSES.setdefault(each.__name__, each)
        if known is not each:
            raise ValueError(
                f"{each.__module__}.{each.__name__} cannot be registered for messages: {known.__module__} has a class "
                "of the same name. Rename one of them."
            )


def to_json(value: Any) -> str:
    """Encode a value.

    Raises:
        TypeError: the value has a type that messages may not contain.
    """
    return json.dumps(_encoded(value))


def from_json(text: str | bytes) -> Any:
    """Decode a value, with its original types.

    Raises:
        ValueError: the text does not come from `to_json`.
    """
    try:
        return _decoded(json.loads(text))
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no message of a rank ({type(error).__name__}: {error})") from error


def _encoded(value: Any) -> Any:
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if type(value) is list:
        return [_encoded(each) for each in value]
    if type(value) in (tuple, torch.Size):
        return {type(value).__name__: [_encoded(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(each)] for key, each in value.items()]}
    if isinstance(value, _CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value):
        raise TypeError(f"a {type(value).__module__}.{name} cannot be told to other ranks")
    if isinstance(value, Enum):
        return {name: value.name}
    return {name: {each.name: _encoded(getattr(value, each.name)) for each in dataclasses.fields(_CLASSES[name])}}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in ("tuple", "Size"):
        return (tuple if kind == "tuple" else torch.Size)(_decoded(each) for each in content)
    if kind == "dict":
        return {_decoded(key): _decoded(each) for key, each in content}
    if kind == "torch":
        constant = getattr(torch, content)
        if not isinstance(constant, _CONSTANTS):
            raise ValueError(f"torch.{content} is no constant of a tensor")
        return constant
    cls = _CLASSES[kind]
    if issubclass(cls, Enum):
        return cls[content]
    return cls(**{name: _decoded(each) for name, each in content.items()})
