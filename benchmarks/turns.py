"""A fit and its peers take turns of a few steps: what disturbs the machine meets all, and each is compiled once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GIB = 2.0**30

Step = Callable[[Any], object]


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def device_clock() -> float:
    """Seconds, once the device has done all that it was given."""
    synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Plan:
    """How many steps there are.

    Attributes:
        warmup: before the first turn, in which everything is compiled.
        steps: of a turn.
        rounds: turns of each that count.
    """

    warmup: int
    steps: int
    rounds: int

    def __len__(self) -> int:
        return self.warmup + self.rounds * self.steps


@dataclass
class Found:
    """What the turns took.

    Attributes:
        step_s: seconds of a step in each turn; equal positions are of the same round.
        first_s: seconds of the very first step, compiling included.
        peak_gib: the most memory that a turn has allocated on the GPU, less what stood there before for others.
    """

    step_s: dict[str, list[float]] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    peak_gib: dict[str, float] = field(default_factory=dict)

    def speeds(self, name: str, peer: str) -> list[float]:
        """How fast one was, relative to another, round by round."""
        return [theirs / own for own, theirs in zip(self.step_s[name], self.step_s[peer], strict=True)]


class Turns:
    """The batches of a fit, whose loader gives peers their turns before it gives the next batch.

    Args:
        name: of the fit.
        batches: are given again and again, to all alike.
        peers: one step of each, given a batch.
        plan: how many steps.
        deadline: on the monotonic clock; no round begins after it.
        clock: seconds, of which differences count.
    """

    def __init__(
        self,
        name: str,
        batches: Sequence[Any],
        peers: Mapping[str, Step],
        plan: Plan,
        deadline: float = float("inf"),
        clock: Callable[[], float] = device_clock,
    ) -> None:
        self.found = Found()
        self.batch_size = len(batches[0][0])  # recipes scale the learning rate by it
        self._name, self._batches, self._peers, self._plan = name, batches, peers, plan
        self._deadline, self._clock = deadline, clock
        self._standing = _allocated()

    def __len__(self) -> int:
        return len(self._plan) + 1

    def __iter__(self) -> Iterator[Any]:
        for at in range(self._plan.warmup):
            yield from self._turn([self._batch(at)], self.found.first_s if at == 0 else {})
        for turn in range(self._plan.rounds):
            if time.monotonic() > self._deadline:
                return
            first, taken = self._plan.warmup + turn * self._plan.steps, dict[str, float]()
            yield from self._turn([self._batch(first + at) for at in range(self._plan.steps)], taken)
            for name, seconds in taken.items():
                self.found.step_s.setdefault(name, []).append(seconds / self._plan.steps)
        last = self._batch(len(self._plan))
        for step in self._peers.values():
            step(last)
        yield last  # a fit asks for this one, which ends its last turn, and for none after it

    def _turn(self, batches: Sequence[Any], taken: dict[str, float]) -> Iterator[Any]:
        start = self._begin()
        yield from batches
        taken[self._name] = self._end(self._name, start)
        for name, step in self._peers.items():
            start = self._begin()
            for batch in batches:
                step(batch)
            taken[name] = self._end(name, start)

    def _begin(self) -> float:
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return self._clock()

    def _end(self, name: str, start: float) -> float:
        seconds = self._clock() - start
        if DEVICE.type == "cuda":
            peak = (torch.cuda.max_memory_allocated() - self._standing) / GIB
            self.found.peak_gib[name] = max(peak, self.found.peak_gib.get(name, 0.0))
        return seconds

    def _batch(self, step: int) -> Any:
        return self._batches[step % len(self._batches)]


def _allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def turns_by_hand(
    steps: Mapping[str, Step], batches: Sequence[Any], plan: Plan, deadline: float = float("inf")
) -> Found:
    """The same of loops alone; the first takes the place of the fit."""
    first, *_ = steps
    peers = {name: step for name, step in steps.items() if name != first}
    turns = Turns(first, batches, peers, plan, deadline)
    for batch in turns:
        steps[first](batch)
    return turns.found
