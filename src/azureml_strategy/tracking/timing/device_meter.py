"""Measures the parts of a step on a GPU, and how much of forward and backward the GPU waits for the host."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from typing_extensions import override

from azureml_strategy.tracking.timing.meters import STEP_PARTS, Clock, Meter, Part

LAUNCHED = frozenset({Part.FORWARD, Part.BACKWARD})
"""The parts in which a GPU may wait for the host to launch the next kernel."""
# After so many steps the GPU runs at its usual clocks. Then a hold of so many cycles, 0.1 ms at 1 GHz, measures them.
_TRIED, _TRIAL = 4, 100_000
# The number of steps after which a step is held first. It doubles each time, up to this distance between two.
_FIRST, _RAREST = 8, 1024
# Seconds that all holds together may take in any run, and further ones for each second of it; and those of one step.
_FREE_S, _SHARE, _STEP_S = 0.25, 0.005, 1.0
# A hold is longer than the host's work by this factor and these seconds. The factor doubles, up to the second number,
# when the host was not done within a hold.
_MARGIN, _MOST_MARGIN, _EXTRA_S = 1.5, 6.0, 2e-4
# Held steps whose times are averaged, and holds whose rates are compared.
_KEPT = 4
Interval = tuple[Part, int]
"""The part of the time between two marks, and how many intervals of this part came before it in its step."""


class Mark(NamedTuple):
    """The beginning of an interval of a step.

    Attributes:
        moment: on the device.
        at: when the host recorded it, in seconds.
        ahead: whether the device had not yet reached the mark before this one. Then the host launched all work between
            the two marks before the device began with it, so the device did not wait for the host.
    """

    moment: Any
    part: Part
    at: float
    ahead: bool


class KernelTimes:
    """What the intervals of forward and backward take on a GPU that does not wait for its host.

    Events alone cannot show this: between two of them, a GPU that keeps up with the host may compute all the time or
    hardly ever. So now and then a step is held: before each interval the GPU spins in one thread until the host has
    launched all of the interval. Then it computes without a break, and the time between the events is the time that the
    kernels take.

    A held step takes as long as the host needs to launch it, on this rank and on all ranks that wait for it. So all
    ranks hold a step after the same numbers of steps: 8, 16, 32 and so on, then each 1,024th. A rank that may not hold
    a step then waits for the next of these numbers. A step is held for a second at most, and all holds together take at
    most a quarter of a second and 0.5 % of the time, as measured. If the host is ahead of the GPU, no step is held.

    A hold lasts for a number of cycles of the GPU. A trial measures their rate, and each hold measures it again. `hold`
    makes the device spin for so many cycles after all work queued so far; None holds no step. `read` is the host's
    clock.
    """

    def __init__(self, clock: Clock, hold: Callable[[int], None] | None, read: Callable[[], float]) -> None:
        self._clock, self._hold, self._read = clock, hold, read
        self._begun = read()
        self._spent_s = 0.0
        self._margin = _MARGIN
        self._spins: deque[tuple[int, Any, Any]] = deque()  # cycles, and the moments before and after
        self._rates: deque[float] = deque(maxlen=_KEPT)
        self._plan: dict[Interval, int] = {}
        self._held: deque[list[Mark]] = deque()
        self._whole: dict[Interval, deque[float]] = {}
        self._bounds: dict[Interval, float] = {}
        if hold is not None:
            hold(1)  # at its first launch CUDA loads the kernel, which takes the host milliseconds

    def plan(self, count: int, step: Sequence[Mark]) -> bool:
        """Whether to hold the next step. `count` steps are done, and `step` was the last one with usual times."""
        self.learn()
        if count == _TRIED:
            self._spin(_TRIAL)
        # The last holds must be over: their rate and their costs are needed here.
        if not _is_due(count) or self._spins or not self._rates:
            return False
        found = list(intervals(step))
        holds_s = {key: self._margin * (end.at - start.at) + _EXTRA_S for key, start, end in found}
        left_s = _FREE_S + _SHARE * (self._read() - self._begun) - self._spent_s
        if all(end.ahead for _, _, end in found) or sum(holds_s.values()) > min(left_s, _STEP_S):
            return False
        self._plan = {key: int(seconds * max(self._rates)) for key, seconds in holds_s.items()}
        return True

    def hold(self, key: Interval) -> None:
        """Make the device spin before this interval of a held step."""
        if key in self._plan:
            self._spin(self._plan[key])

    def keep(self, step: list[Mark]) -> None:
        """Keep a held step, to learn from."""
        self._held.append(step)

    def learn(self) -> None:
        """Read the holds and the held steps that the device has finished."""
        while self._spins and all(map(self._clock.has_passed, self._spins[0][1:])):
            cycles, start, end = self._spins.popleft()
            seconds = self._clock.seconds(start, end)
            self._spent_s += seconds
            if seconds > 0:  # the measured time is too long at most, so the highest of several rates is the best
                self._rates.append(cycles / seconds)
        while self._held and all(self._clock.has_passed(mark.moment) for mark in self._held[0]):
            late = False
            for key, start, end in intervals(self._held.popleft()):
                seconds = self._clock.seconds(start.moment, end.moment)
                if end.ahead:
                    self._whole.setdefault(key, deque(maxlen=_KEPT)).append(seconds)
                else:  # the hold ended before the host was done, so this time includes some waiting
                    self._bounds[key] = seconds
                    late = True
            self._margin = min(2 * self._margin, _MOST_MARGIN) if late else self._margin

    def of(self, key: Interval) -> float:
        """Seconds that the kernels of an interval take, or at most take; infinite if nothing is known."""
        whole = self._whole.get(key)
        return fmean(whole) if whole else self._bounds.get(key, math.inf)

    def _spin(self, cycles: int) -> None:
        if self._hold is not None:
            start = self._clock.now()
            self._hold(cycles)
            self._spins.append((cycles, start, self._clock.now()))


def _is_due(count: int) -> bool:
    """Whether a step may be held after so many."""
    return count >= _FIRST and (count % _RAREST == 0 or (count < _RAREST and count.bit_count() == 1))


class DeviceMeter(Meter):
    """Records the ends of the main spans in the GPU's stream, so that the times are the GPU's.

    The host queues work far ahead of the GPU. A part gets the time between its marks on the GPU, so a wait for data
    shows up only if the GPU had nothing else to do. What forward and backward take beyond their `KernelTimes`, while
    the host was still launching, counts as `HOST`. This is never too much. It is too little where something in an
    interval makes the host wait for the GPU, or where an interval has more kernels than the driver queues (about a
    thousand). Without `hold` there is no `HOST`.

    Attributes:
        exposed_share: part of the backward pass, 0 to 1, in which gradients were sent and nothing computed.
    """

    parts = frozenset(STEP_PARTS) - {Part.FORWARD_WAIT, Part.HOST, Part.OTHER}

    def __init__(
        self,
        clock: Clock,
        hold: Callable[[int], None] | None = None,
        read: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.exposed_share = 0.0
        self._clock, self._read = clock, read
        self._kernels = KernelTimes(clock, hold, read)
        self._inside = [Part.OTHER]
        self._steps = 0
        # After a held step the device is late and catches up in the next steps, which are shorter than usual. They are
        # left out until the device waits for the host in the same intervals as before, but at most `_FIRST` of them.
        self._held = False
        self._settling = 0
        self._usual: list[Mark] = []
        self._begin(clock.now())

    @override
    def enter(self, part: Part) -> None:
        self._inside.append(part)
        self._mark(part)

    @override
    def leave(self) -> None:
        self._inside.pop()
        self._mark(self._inside[-1])

    @override
    def cut(self, host: list[float], end: Any = None) -> list[Mark] | None:
        end = self._clock.now() if end is None else end
        step = [*self._marks, Mark(end, Part.OTHER, self._read(), self._is_ahead())]
        self._begin(end)
        if not any(mark.part in LAUNCHED for mark in step):
            return step  # no step, but a validation or something else between two steps
        self._steps += 1
        counts = not self._held and not self._settling
        if self._held:
            self._settling = _FIRST
            self._kernels.keep(step)
        elif self._settling:
            ahead, usual = ([end.ahead for _, _, end in intervals(each)] for each in (step, self._usual))
            self._settling = 0 if ahead == usual else self._settling - 1
        else:
            self._usual = step
        # After each step, because ranks settle after different steps and hold after the same ones.
        self._held = self._kernels.plan(self._steps, self._usual)
        return step if counts else None

    @override
    def moments(self, step: list[Mark]) -> Iterator[Any]:
        return (mark.moment for mark in step)

    @override
    def seconds(self, step: list[Mark]) -> list[float]:
        self._kernels.learn()
        found = [0.0] * len(Part)
        for start, end in pairwise(step):
            found[start.part] += self._clock.seconds(start.moment, end.moment)
        backward = found[Part.BACKWARD]
        for key, start, end in intervals(step):
            if end.ahead:
                continue
            whole = self._clock.seconds(start.moment, end.moment)
            # After the host's last launch, the device no longer waits for the host.
            waited = min(max(whole - self._kernels.of(key), 0.0), end.at - start.at)
            found[key[0]] -= waited
            found[Part.HOST] += waited
        exposed = min(self.exposed_share * backward, found[Part.BACKWARD])
        found[Part.BACKWARD] -= exposed
        found[Part.COMMUNICATION] += exposed
        return found

    def _begin(self, moment: Any) -> None:
        self._marks = [Mark(moment, self._inside[-1], self._read(), ahead=False)]
        self._entered: Counter[Part] = Counter()

    def _mark(self, part: Part) -> None:
        if self._held and part in LAUNCHED:
            self._add(Part.OTHER)
            self._kernels.hold((part, self._entered[part]))
        self._entered[part] += 1
        self._add(part)

    def _add(self, part: Part) -> None:
        moment = self._clock.now()
        self._marks.append(Mark(moment, part, self._read(), self._is_ahead()))

    def _is_ahead(self) -> bool:
        # A query takes time, so there is one only at the end of an interval.
        last = self._marks[-1]
        return last.part in LAUNCHED and not self._clock.has_passed(last.moment)


def intervals(step: Sequence[Mark]) -> Iterator[tuple[Interval, Mark, Mark]]:
    """The intervals of forward and backward in a step: which one it is, its mark and the next one."""
    counts: Counter[Part] = Counter()
    for start, end in pairwise(step):
        if start.part in LAUNCHED:
            yield (start.part, counts[start.part]), start, end
            counts[start.part] += 1
