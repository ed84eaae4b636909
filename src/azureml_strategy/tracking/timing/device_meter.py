"""Measures the parts of a step on a GPU, and how much of forward and backward the GPU waits for the host."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from azureml_strategy.tracking.timing.meters import Clock, Part

LAUNCHED = frozenset({Part.FORWARD, Part.BACKWARD})
"""The parts in which a GPU may wait for the host to launch the next kernel."""
# After so many steps the GPU is awake, and a trial of so many cycles measures how fast it counts them: 0.1 ms at 1 GHz.
_TRIED, _TRIAL = 4, 100_000
# The first count of steps after which one is held, and the longest distance between two. It doubles, so that few are.
_FIRST, _RAREST = 8, 1024
# Seconds that all holds may take: in any run, and of each second that it trains. And those of one step.
_FREE_S, _SHARE, _STEP_S = 0.25, 0.005, 1.0
# A hold outlasts the host's work by this factor, which doubles while the host is not done, and by these seconds.
_MARGIN, _MOST_MARGIN, _EXTRA_S = 1.5, 6.0, 2e-4
# Held steps whose times are averaged, and holds whose rates are compared.
_KEPT = 4
Interval = tuple[Part, int]
"""The part of an interval between two marks, and how many of this part came before it in its step."""


class Mark(NamedTuple):
    """The beginning of an interval of a step.

    Attributes:
        moment: on the device.
        part: of the time until the next mark.
        at: when the host recorded it, in seconds.
        ahead: whether the device had yet to reach the mark before this one. Then the host launched all work between the
            two marks before the device began with it, so the device did not wait for the host.
    """

    moment: Any
    part: Part
    at: float
    ahead: bool


class Spin(NamedTuple):
    """A hold in the device's queue, and the moments before and after it."""

    cycles: int
    start: Any
    end: Any


class KernelTimes:
    """What the intervals of forward and backward take on a GPU that does not wait for its host.

    Events alone cannot show this: between two of them, a GPU that keeps up with the host may compute all the time or
    hardly ever. So now and then a step is held: before each interval the GPU spins in one thread until the host has
    launched all of the interval. Then it computes without a break, and the time between the events is the time that the
    kernels take.

    A held step takes as long as the host needs to launch it, on this rank and on all ranks that wait for it. So each
    rank holds a step after the same counts of steps: 8, 16, 32 and so on, then each 1,024th. A rank that may not hold
    at one of them waits for the next. A step is held for a second at most, and all holds together take a quarter of a
    second and 0.5 % of the time, as measured. A run whose host is ahead is not held.

    A hold lasts for cycles of the GPU. Their rate is measured by a trial, and anew around each hold. `hold` makes the
    device spin for a number of its cycles, after all work queued so far; None holds no step. `read` is the host's
    clock.
    """

    def __init__(self, clock: Clock, hold: Callable[[int], None] | None, read: Callable[[], float]) -> None:
        self._clock, self._hold, self._read = clock, hold, read
        self._begun = read()
        self._spent_s = 0.0
        self._margin = _MARGIN
        self._spins: deque[Spin] = deque()
        self._rates: deque[float] = deque(maxlen=_KEPT)
        self._plan: dict[Interval, int] = {}
        self._held: deque[list[Mark]] = deque()
        self._whole: dict[Interval, deque[float]] = {}
        self._bounds: dict[Interval, float] = {}
        if hold is not None:
            hold(1)  # CUDA loads the kernel that spins at its first launch: on the host, for milliseconds

    def plan(self, count: int, step: Sequence[Mark]) -> bool:
        """Whether to hold the next step, after so many steps, of which this was the last usual one."""
        self.learn()
        if count == _TRIED:
            self._spin(_TRIAL)
        # The last holds must be over, so that their rate and their costs are known.
        if not _is_due(count) or self._spins or not self._rates:
            return False
        found = list(intervals(step))
        wanted = {key: self._margin * (end.at - start.at) + _EXTRA_S for key, start, end in found}
        left_s = _FREE_S + _SHARE * (self._read() - self._begun) - self._spent_s
        if all(end.ahead for _, _, end in found) or sum(wanted.values()) > min(left_s, _STEP_S):
            return False
        self._plan = {key: int(seconds * max(self._rates)) for key, seconds in wanted.items()}
        return True

    def hold(self, key: Interval) -> None:
        """Have the device wait, in a step that is held, before this interval."""
        if key in self._plan:
            self._spin(self._plan[key])

    def keep(self, step: list[Mark]) -> None:
        """Keep a held step, to learn from."""
        self._held.append(step)

    def learn(self) -> None:
        """Learn from the holds and the held steps that the device is done with."""
        while self._spins and all(map(self._clock.has_passed, self._spins[0][1:])):
            cycles, start, end = self._spins.popleft()
            seconds = self._clock.seconds(start, end)
            self._spent_s += seconds
            if seconds > 0:  # never less than the device spun, so that the highest of several rates is the best
                self._rates.append(cycles / seconds)
        while self._held and all(self._clock.has_passed(mark.moment) for mark in self._held[0]):
            late = False
            for key, start, end in intervals(self._held.popleft()):
                seconds = self._clock.seconds(start.moment, end.moment)
                if end.ahead:
                    self._whole.setdefault(key, deque(maxlen=_KEPT)).append(seconds)
                else:  # the hold was over before the host was done: some of this is waiting
                    self._bounds[key] = seconds
                    late = True
            self._margin = min(2 * self._margin, _MOST_MARGIN) if late else self._margin

    def of(self, key: Interval) -> float:
        """Seconds that the kernels of an interval take, or that they take at most; infinite if nothing is known."""
        whole = self._whole.get(key)
        return fmean(whole) if whole else self._bounds.get(key, math.inf)

    def _spin(self, cycles: int) -> None:
        if self._hold is not None:
            start = self._clock.now()
            self._hold(cycles)
            self._spins.append(Spin(cycles, start, self._clock.now()))


def _is_due(count: int) -> bool:
    """Whether a step may be held after so many."""
    return count >= _FIRST and (count % _RAREST == 0 or (count < _RAREST and count.bit_count() == 1))


class DeviceMeter:
    """Records the ends of the main spans in the GPU's stream, so that the times are the GPU's.

    The host queues work far ahead of the GPU. A part gets the time between its marks on the GPU, so that a wait for
    data shows up only if the GPU had nothing else to do. What forward and backward take beyond their `KernelTimes` is
    `HOST`, as far as the host was still launching: never more than that, and less where something in an interval makes
    the host wait for the GPU, or where an interval has more kernels than the driver queues (about a thousand).

    Without `hold` there is no `HOST`.

    Attributes:
        exposed_share: part of the backward pass, 0 to 1, in which gradients were sent and nothing computed.
    """

    parts = frozenset(
        {
            *(Part.DATA_WAIT, Part.COPY, Part.FORWARD, Part.BACKWARD),
            *(Part.OPTIMIZER, Part.BUBBLE, Part.COMMUNICATION),
        }
    )

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
        # After a held step the device is late and catches up in the next ones, which are shorter than others. These are
        # left out, until it waits for the host in the same intervals as before, or for `_FIRST` steps at most.
        self._held = False
        self._settling = 0
        self._usual: list[Mark] = []
        self._begin(clock.now())

    def enter(self, part: Part) -> None:
        """A main span begins."""
        self._inside.append(part)
        self._mark(part)

    def leave(self) -> None:
        """The innermost main span ends."""
        self._inside.pop()
        self._mark(self._inside[-1])

    def cut(self, host: list[float], end: Any = None) -> list[Mark] | None:
        """A step ends: its marks, with one at its end; None for a step that does not count."""
        end = self._clock.now() if end is None else end
        step = [*self._marks, Mark(end, Part.OTHER, self._read(), self._is_ahead())]
        self._begin(end)
        if not any(mark.part in LAUNCHED for mark in step):
            return step  # what was between two steps, such as a validation
        self._steps += 1
        counts = not self._held and not self._settling
        if self._held:
            self._settling = _FIRST
            self._kernels.keep(step)
        elif self._settling:
            self._settling = 0 if _pattern(step) == _pattern(self._usual) else self._settling - 1
        else:
            self._usual = step
        # Asked after each step: ranks settle at different ones, and hold at the same.
        self._held = self._kernels.plan(self._steps, self._usual)
        return step if counts else None

    def moments(self, step: list[Mark]) -> Iterator[Any]:
        """What the device must have passed before the times of a step can be read."""
        return (mark.moment for mark in step)

    def seconds(self, step: list[Mark]) -> list[float]:
        """The time between the marks."""
        self._kernels.learn()
        found = [0.0] * len(Part)
        for start, end in pairwise(step):
            found[start.part] += self._clock.seconds(start.moment, end.moment)
        backward = found[Part.BACKWARD]
        for key, start, end in intervals(step):
            if end.ahead:
                continue
            whole = self._clock.seconds(start.moment, end.moment)
            # What the device does after the host's last launch is no wait for the host.
            waited = min(max(whole - self._kernels.of(key), 0.0), end.at - start.at)
            found[key[0]] -= waited
            found[Part.HOST] += waited
        exposed = min(self.exposed_share * backward, found[Part.BACKWARD])
        found[Part.BACKWARD] -= exposed
        found[Part.COMMUNICATION] += exposed
        return found

    def _begin(self, moment: Any) -> None:
        self._marks = [Mark(moment, self._inside[-1], self._read(), ahead=False)]
        self._seen: Counter[Part] = Counter()

    def _mark(self, part: Part) -> None:
        if self._held and part in LAUNCHED:
            self._add(Part.OTHER)
            self._kernels.hold((part, self._seen[part]))
        self._seen[part] += 1
        self._add(part)

    def _add(self, part: Part) -> None:
        moment = self._clock.now()
        self._marks.append(Mark(moment, part, self._read(), self._is_ahead()))

    def _is_ahead(self) -> bool:
        # One query, and only where the answer counts.
        last = self._marks[-1]
        return last.part in LAUNCHED and not self._clock.has_passed(last.moment)


def _pattern(step: Sequence[Mark]) -> list[bool]:
    return [end.ahead for _, _, end in intervals(step)]


def intervals(step: Sequence[Mark]) -> Iterator[tuple[Interval, Mark, Mark]]:
    """The intervals of forward and backward in a step: which one, its mark and the next one."""
    seen: Counter[Part] = Counter()
    for start, end in pairwise(step):
        if start.part in LAUNCHED:
            yield (start.part, seen[start.part]), start, end
            seen[start.part] += 1
