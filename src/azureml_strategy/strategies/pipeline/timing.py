"""How much of a step a stage works, and how much it waits for its neighbours: the bubble."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def pipeline_bubble(num_stages: int, micro_batches: int) -> float:
    """The share of a step, 0 to 1, that equal stages wait under 1F1B.

    A stage works on m micro-batches while m + p - 1 pass from the first to the last (Narayanan et al. 2021, section
    2.2, https://arxiv.org/abs/2104.04473, which gives (p - 1) / m, the same time over the time of work).

    Args:
        num_stages: p.
        micro_batches: m.
    """
    return (num_stages - 1) / (micro_batches + num_stages - 1)


class StageClock:
    """Takes the time of a step's schedule and the part of it spent in forward and backward passes.

    The schedule ends with the last backward pass: what comes after, to reduce gradients, is no bubble.

    On a GPU the moments are events of its stream, which cost nothing to wait for until they are read.

    Args:
        device: the stage's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._running = False
        self._moments: list[Any] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure what happens inside; outside of it nothing is taken down."""
        self._moments, self._running = [self._now()], True
        yield
        self._running = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """A forward or a backward pass."""
        if not self._running:
            yield
            return
        self._moments.append(self._now())
        yield
        self._moments.append(self._now())

    def read(self) -> tuple[float, float]:
        """Seconds of work, and seconds of the whole schedule, of the last step measured; waits for the GPU's end."""
        first, *passes = self._moments
        if self._on_gpu:
            passes[-1].synchronize()
        work = sum(self._seconds(start, end) for start, end in zip(passes[::2], passes[1::2], strict=True))
        return work, self._seconds(first, passes[-1])

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self._on_gpu else end - start
