"""The random numbers that each rank would have drawn next."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Plain values and tensors only: Lightning loads a checkpoint of one file with torch's `weights_only=True`.
RandomState = dict[str, Any]


def random_state() -> RandomState:
    """The state of torch's, numpy's and Python's generators, and of this process's GPU."""
    algorithm, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [str(algorithm), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def set_random_state(state: RandomState) -> None:
    """Go on with the numbers that would have followed `random_state()`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    algorithm, keys, *rest = state["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])


def gather(value: Any) -> list[Any]:
    """What each rank gave, by rank and on all of them; a collective."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
