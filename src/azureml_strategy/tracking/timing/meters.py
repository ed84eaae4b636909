"""The parts of a step, and the meters of a CPU, which measure by the host's clock and the kernel's."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import Any, Protocol

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override


class Part(IntEnum):
    """What time is spent on. The first ten are parts of a step."""

    DATA_WAIT = 0
    COPY = 1
    FORWARD = 2
    FORWARD_WAIT = 3
    BACKWARD = 4
    HOST = 5
    COMMUNICATION = 6
    BUBBLE = 7
    OPTIMIZER = 8
    OTHER = 9
    STARTUP = 10
    VALIDATION = 11
    CHECKPOINT = 12
    ENDING = 13

    @property
    def label(self) -> str:
        """The name in metrics."""
        return self.name.lower()


STEP_PARTS = tuple(Part)[:10]
# A thread that was off its core for less than this has waited for nobody. Then its time in the queue is not read, since
# that takes longer than reading the clocks.
_NO_WAIT_S = 10e-6


class Clock(Protocol):
    """Records moments now, and measures the time between them later."""

    def now(self) -> Any:
        """Record a moment."""

    def has_passed(self, moment: Any) -> bool:
        """Whether the moment has been reached, so that it can be measured."""

    def wait_for(self, moment: Any) -> None:
        """Wait until the moment is reached."""

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two moments that have passed."""


class Meter:
    """Measures at the ends of the main spans what the host's clock does not show.

    This one adds nothing to that clock. It serves a single process, and systems whose kernel does not tell how long a
    thread sleeps.

    Attributes:
        parts: those at whose ends it measures.
    """

    parts: frozenset[Part] = frozenset()

    def enter(self, part: Part) -> None:
        """A main span begins."""

    def leave(self) -> None:
        """The innermost main span ends."""

    def cut(self, host: list[float], end: Any = None) -> Any:
        """A step ends, and the next one begins.

        Args:
            host: seconds of each part of the step, by the host's clock. It belongs to the meter from now on.
            end: the step's end, on the clock that measures steps; by default now.

        Returns:
            The step, for `seconds`; None for a step that must not count, because measuring it has changed its times.
        """
        return host

    def moments(self, step: Any) -> Iterable[Any]:
        """What the device must have passed before the times of a step can be read."""
        return ()

    def seconds(self, step: Any) -> list[float]:
        """Seconds of each part of a step, all of whose `moments` have passed."""
        times: list[float] = step
        return times


class HostMeter(Meter):
    """Measures on a CPU how much of forward, backward and optimizer a rank waits for others.

    While the ranks exchange gradients or parameters and nothing is left to compute, the training thread sleeps. The
    kernel tells how long a thread was on a core, and how long it queued for one. In the rest of the time it slept. So a
    thread that others keep off the cores does not count as waiting. This works for any strategy, and for waits in C++.

    Waits in the forward pass are a part of their own, because the kernel does not say what a thread waits for. It may
    be a file, a process or a lock, or other ranks: in a collective of the script, or of a strategy that gathers
    parameters or synchronizes buffers there. Where a rank has several threads and too few cores, it may also be another
    thread of the same rank.
    """

    parts = frozenset({Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER, Part.BUBBLE, Part.COMMUNICATION})

    _waits: Mapping[Part, Part] = {
        Part.FORWARD: Part.FORWARD_WAIT,
        Part.BACKWARD: Part.COMMUNICATION,
        Part.OPTIMIZER: Part.COMMUNICATION,
    }

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # proc(5): the nanoseconds on a core, and in the queue for one. The first number is a tick late and not used.
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._inside: list[Part] = []
        self._slept = [0.0] * len(Part)
        self._off_s = self._queued_s = 0.0

    def close(self) -> None:
        """Release the file."""
        os.close(self._file)

    @override
    def enter(self, part: Part) -> None:
        self._read()
        self._inside.append(part)

    @override
    def leave(self) -> None:
        self._read()
        self._inside.pop()

    @override
    def cut(self, host: list[float], end: Any = None) -> list[float]:
        for part, wait in self._waits.items():
            waited = max(0.0, min(self._slept[part], host[part]))
            host[part] -= waited
            host[wait] += waited
        self._slept = [0.0] * len(Part)
        return host

    def _read(self) -> None:
        off_s = self._clock() - time.thread_time()
        off_s, self._off_s = off_s - self._off_s, off_s
        if off_s < _NO_WAIT_S:
            return
        queued_s = int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        queued_s, self._queued_s = queued_s - self._queued_s, queued_s
        if self._inside:
            self._slept[self._inside[-1]] += off_s - queued_s


def host_meter(world_size: int) -> Meter:
    """The meter of a rank that trains on a CPU. A single rank waits for nobody."""
    if world_size > 1:
        with suppress(OSError, ValueError, IndexError):  # another system, or a container that hides it
            meter = HostMeter()
            meter.enter(Part.OTHER)  # reads the file once, which may fail
            meter.leave()
            return meter
    return Meter()


class ReducerTimes:
    """Reads from DDP's reducer how long gradients are sent while nothing computes.

    It serves GPUs, where the marks of a step cannot tell communication from computing. DDP measures one step in `every`
    steps, since it must wait for the GPU to read one. `model` returns the model as the strategy has wrapped it now:
    tuning and local SGD wrap it anew.
    """

    def __init__(self, model: Callable[[], Any], every: int) -> None:
        self._model = model
        self._every = every
        self._measured: weakref.ref[DistributedDataParallel] | None = None
        self.exposed_share()

    def exposed_share(self) -> float:
        """The share of the last measured backward pass, 0 to 1, in which gradients were sent and nothing computed."""
        model = self._model()
        if not isinstance(model, DistributedDataParallel):
            return 0.0
        if self._measured is None or self._measured() is not model:
            model._set_ddp_runtime_logging_sample_rate(self._every)  # type: ignore[no-untyped-call]
            self._measured = weakref.ref(model)
            return 0.0
        # In nanoseconds: torch/csrc/distributed/c10d/logger.cpp.
        found = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        exposed = found.get("backward_comm_time", 0) - found.get("backward_compute_comm_overlap_time", 0)
        whole = found.get("backward_compute_time", 0) + exposed
        return min(max(exposed / whole, 0.0), 1.0) if whole > 0 else 0.0
