"""Save and restore the random generators of a rank, so that it draws the numbers it would have drawn next."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

# Plain values and tensors only: Lightning loads a single-file checkpoint with torch's `weights_only=True`.
RandomState = dict[str, Any]
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# How deep to search attributes for a generator, such as that of the third step in a data set's list of transforms.
_DEPTH = 6
# A longer list or dictionary holds data.
_MOST_ITEMS = 64


def random_state(generators: Mapping[str, Generator] | None = None) -> RandomState:
    """Get the state of the global generators of torch, numpy and Python, of this process's GPU, and of those given."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": _plain_legacy(np.random.get_state(legacy=True)),
        "python": random.getstate(),
        "generators": {name: _state_of(each) for name, each in (generators or {}).items()},
    }


def set_random_state(state: RandomState, generators: Mapping[str, Generator] | None = None) -> None:
    """Restore the state from `random_state`. Generators whose names are not in it stay as they are."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(_legacy(state["numpy"]))
    random.setstate(state["python"])
    for name, each in (generators or {}).items():
        if name in state["generators"]:
            _set_state(each, state["generators"][name])


def find_generators(owners: Mapping[str, object]) -> dict[str, Generator]:
    """Find generators that objects keep as attributes: a data loader, its sampler, a data set, a module.

    Returns:
        Generators by the path that leads to each from the owner's name. The path is the same in a process that was
        started the same way.
    """
    found: dict[str, Generator] = {}
    seen: set[int] = set()
    for name, owner in owners.items():
        found |= dict(_search(name, owner, _DEPTH, seen))
    return found


def _search(name: str, owner: object, depth: int, seen: set[int]) -> Iterator[tuple[str, Generator]]:
    if isinstance(owner, _KINDS):
        if id(owner) not in seen:
            seen.add(id(owner))
            yield name, owner
        return
    if depth == 0 or id(owner) in seen:
        return
    seen.add(id(owner))
    for inner, value in _parts(owner):
        yield from _search(f"{name}.{inner}", value, depth - 1, seen)


def _parts(owner: object) -> list[tuple[str, object]]:
    """The parts of an object that may hold a generator. Of a module, these are the generators of all its layers."""
    if isinstance(owner, (list, tuple)):
        return [(str(i), each) for i, each in enumerate(owner)] if len(owner) <= _MOST_ITEMS else []
    if isinstance(owner, dict):
        return [(str(key), each) for key, each in owner.items()] if len(owner) <= _MOST_ITEMS else []
    if isinstance(owner, nn.Module):
        attributes = ((f"{path}.{key}", each) for path, layer in owner.named_modules() for key, each in _own(layer))
        return [(path, each) for path, each in attributes if isinstance(each, _KINDS)]
    return _own(owner)


def _own(owner: object) -> list[tuple[str, object]]:
    """The attributes of an ordinary object; none of an object that refers to everything else, such as the Trainer."""
    if isinstance(owner, (type, ModuleType, FunctionType, torch.Tensor, Trainer)):
        return []
    attributes = getattr(owner, "__dict__", {})
    # A loader's iterator holds its worker processes and their arguments.
    left_out = {"_iterator"} if isinstance(owner, DataLoader) else set()
    return [(name, each) for name, each in attributes.items() if name not in left_out]


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _plain_legacy(generator.get_state(legacy=True))
    return generator.getstate()


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _array(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_legacy(state))
    else:
        generator.setstate(state)


def _plain_legacy(state: Any) -> list[Any]:
    algorithm, keys, *rest = state
    return [str(algorithm), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]


def _legacy(state: list[Any]) -> Any:
    algorithm, keys, *rest = state
    return (algorithm, keys.numpy().astype(np.uint32), *rest)


def _plain(state: Any) -> Any:
    """Convert a bit generator's state, which has numbers, names and sometimes arrays of unsigned numbers."""
    if isinstance(state, dict):
        return {name: _plain(each) for name, each in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": str(state.dtype), "numbers": state.tolist()}
    return state


def _array(state: Any) -> Any:
    if isinstance(state, dict) and state.keys() == {"dtype", "numbers"}:
        return np.asarray(state["numbers"], dtype=state["dtype"])
    return {name: _array(each) for name, each in state.items()} if isinstance(state, dict) else state
