"""Decides from the times of all ranks which of them hold up the others, and by what.

Ranks that wait for one another take equally long for a step. So only each rank's own times count: computing, the wait
for data, and callbacks. A rank is slow if one of these takes longer than on the other ranks.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

Cause = Literal["compute", "data", "callbacks", "link"]

# A rank is named if it was slow in so many of the last windows. One slow window may be a garbage collection, or a
# neighbour on the machine.
SLOW_WINDOWS, LAST_WINDOWS = 3, 4
# A rank is reported at the end of the run if it had at least this excess in at least this share of the windows.
_LASTING_EXCESS, _LASTING_SHARE = 0.05, 0.75
# A whole run must have so many windows. Of two equally fast ranks, one is the slower one in all of six windows in one
# of 32 runs, by chance.
_FEWEST_WINDOWS = 6
# The part of a delay that the rank itself shows. A slow link also delays its other end, whose data is acknowledged over
# the link. So the rank that sends over it exceeds the others by two thirds of the delay (benchmarks/slow_ranks.py).
_VISIBLE: Mapping[Cause, float] = {"compute": 1.0, "data": 1.0, "callbacks": 1.0, "link": 2 / 3}
_CAUSES: tuple[Cause, ...] = get_args(Cause)
# Shorter delays of a step are noise of the operating system.
_SHORTEST_S = 0.002
# A delay is compared with how much it changes from window to window, over so many windows. A few windows may change
# little by chance, so the delay must be larger while there are few.
_NOISE_WINDOWS = 16
_FEW_WINDOWS_MARGIN = 6.0
# Over the whole run a delay must be so many standard errors of the median. The number is large because the report names
# the worst of many ranks and causes.
_LASTING_SIGMAS = 4.0


@dataclass(frozen=True)
class RankWindow:
    """The times of one rank in a window: medians over its steps, in seconds a step.

    Attributes:
        step: at which the window ended.
        compute_s: forward, backward and optimizer, without waiting.
        data_wait_s: waiting for a batch.
        callbacks_s: callbacks, loggers and the rest of the loop.
        communication_s: waiting for other ranks.
        link_s: time in which its busiest connection had bytes that the network had not taken yet; None before it is
            known.
        peer: address at the other end of that connection.
        group: ranks of one group do the same work, such as the replicas of a pipeline's stage.
    """

    step: int
    compute_s: float
    data_wait_s: float
    callbacks_s: float
    communication_s: float
    link_s: float | None = None
    peer: str = ""
    group: int = 0

    @property
    def own_s(self) -> float:
        """The time in which the rank itself works, and the others may wait for it."""
        return self.compute_s + self.data_wait_s + self.callbacks_s

    @property
    def whole_s(self) -> float:
        """The time of the step."""
        return self.own_s + self.communication_s

    def of(self, cause: Cause) -> float | None:
        """The time in which this cause shows; None if it is not known."""
        return {
            "compute": self.compute_s,
            "data": self.data_wait_s,
            "callbacks": self.callbacks_s,
            "link": self.link_s,
        }[cause]


@dataclass(frozen=True)
class Straggler:
    """A rank that holds up the others, by so many seconds a step. An excess of 0.3 prolongs the step by 30 %.

    A rank that is faster than the others has negative numbers. For a link, `peer` is the address at its other end.
    """

    rank: int
    cause: Cause
    excess: float
    delay_s: float = 0.0
    peer: str = ""

    @property
    def counts(self) -> bool:
        """Whether it prolongs the step by more than noise does."""
        return self.delay_s >= _SHORTEST_S and self.excess > 0


class StragglerDetector:
    """Compares the ranks, window by window.

    Args:
        threshold: a rank with this excess or more is slow; of a link, two thirds of it suffice.

    Attributes:
        slow: the ranks that are slow at present, each with the cause.
    """

    def __init__(self, threshold: float = 0.15) -> None:
        self._threshold = threshold
        self._windows: Counter[Cause] = Counter()
        self._recent: deque[set[tuple[int, Cause]]] = deque(maxlen=LAST_WINDOWS)
        self.slow: set[tuple[int, Cause]] = set()
        self._excesses: dict[tuple[int, Cause], list[float]] = defaultdict(list)
        self._delays: dict[tuple[int, Cause], deque[float]] = defaultdict(lambda: deque(maxlen=_NOISE_WINDOWS))

    def add(self, windows: Sequence[RankWindow]) -> list[Straggler]:
        """Compare the ranks in one more window, given by all ranks in their order.

        Returns:
            The ranks that are named now, since they were slow in several windows. Each is named once, and again only
            after it was not slow any more.
        """
        self._windows.update(cause for cause in _CAUSES if all(window.of(cause) is not None for window in windows))
        found = {(each.rank, each.cause): each for each in delays(windows)}
        for key, each in found.items():
            self._delays[key].append(each.delay_s)
        counting = {key: each for key, each in found.items() if each.counts}
        for key, each in counting.items():
            if each.excess >= _LASTING_EXCESS * _VISIBLE[each.cause]:
                self._excesses[key].append(each.excess)
        slow = {key for key, each in counting.items() if each.excess >= self._threshold * _VISIBLE[each.cause]}
        self._recent.append(slow)
        counts = Counter(key for each in self._recent for key in each)
        self.slow = {key for key in self.slow if counts[key]}
        frequent = [key for key in slow if counts[key] >= SLOW_WINDOWS and key not in self.slow]
        new = [key for key in frequent if self._is_above_noise(key, len(windows))]
        self.slow.update(new)
        return sorted((found[key] for key in new), key=lambda each: -each.excess)

    def lasting(self) -> list[Straggler]:
        """The ranks that took longer in most windows of the run, the worst first. They may be too fast to be named."""
        frequent = {
            key: each for key, each in self._excesses.items() if len(each) >= _LASTING_SHARE * self._windows[key[1]]
        }
        significant = {key: each for key, each in frequent.items() if self._is_significant(key, len(each))}
        ranks = [Straggler(rank, cause, statistics.median(each)) for (rank, cause), each in significant.items()]
        return sorted(ranks, key=lambda each: -each.excess)

    def _is_above_noise(self, key: tuple[int, Cause], ranks: int) -> bool:
        """Whether the delay of the last windows is more than it changes from one to the next."""
        seconds = list(self._delays[key])
        # The largest of n normal numbers is about sqrt(2 ln n) standard deviations.
        least = math.sqrt(2 * math.log(len(_CAUSES) * ranks)) + _FEW_WINDOWS_MARGIN / (len(seconds) - 1)
        return statistics.median(seconds[-LAST_WINDOWS:]) >= least * _noise(seconds)

    def _is_significant(self, key: tuple[int, Cause], windows: int) -> bool:
        """Whether the delay over so many windows of the run is more than noise."""
        if windows < _FEWEST_WINDOWS:
            return False
        seconds = self._delays[key]
        # The standard error of a median is 1.25 standard deviations over the root of the number.
        return statistics.median(seconds) >= _LASTING_SIGMAS * 1.25 * _noise(seconds) / math.sqrt(windows)


def _noise(seconds: Sequence[float]) -> float:
    """The median change of a delay from window to window, of two or more: about its standard deviation."""
    return statistics.median(abs(after - before) for before, after in pairwise(seconds))


def delays(windows: Sequence[RankWindow]) -> Iterator[Straggler]:
    """For each rank and cause, by how much it exceeds the median of the other ranks of its group."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, window in enumerate(windows):
        groups[window.group].append(rank)
    for members in groups.values():
        if len(members) > 1:
            yield from _delays_of_group([(rank, windows[rank]) for rank in members])


def _delays_of_group(members: Sequence[tuple[int, RankWindow]]) -> Iterator[Straggler]:
    whole = statistics.median(window.whole_s for _, window in members)
    own = [window.own_s for _, window in members]
    for cause in _CAUSES:
        known = [(rank, window, value) for rank, window in members if (value := window.of(cause)) is not None]
        if len(known) < len(members):
            continue
        values = [value for _, _, value in known]
        for rank, window, value in known:
            excess_s = value - _median_without(values, value)
            # Without this delay the step would take at least the time that the other ranks need for their own work.
            # That counts where ranks rarely synchronize, so that they do not wait for each other within the step.
            usual = max(whole - excess_s, _median_without(own, window.own_s))
            excess = excess_s / usual if usual > 0 else 0.0
            yield Straggler(rank, cause, excess, excess_s, window.peer if cause == "link" else "")


def _median_without(values: Sequence[float], value: float) -> float:
    """The median of all values but one."""
    others = list(values)
    others.remove(value)
    return statistics.median(others)


_HINTS: Mapping[Cause, str] = {
    "compute": "Its GPU or CPU may be throttled, shared or faulty: run `azureml-strategy doctor` there, and "
    "`azureml-strategy bench --pairs` to see its network; then replace the node.",
    "data": "Its loader is slower: look at its disk or mount, give it more workers, or pack the data.",
    "callbacks": "A callback or a logger takes its time there: log less often, or act on all ranks alike.",
    "link": "Measure the links with `azureml-strategy bench --pairs`, look at the adapters with `azureml-strategy "
    "doctor`, and replace the node whose links are slow.",
}
ONE_MACHINE = (
    "All ranks share one machine, and whatever else runs there takes cores from some of them: this accuses no node and "
    "no network. In a job on nodes of their own, `azureml-strategy doctor` and `bench --pairs` tell."
)
"""What to do about a slow rank, or a wait for others, on one machine."""
_WORDS: Mapping[Cause, str] = {
    "compute": "computing",
    "data": "waiting for its data",
    "callbacks": "its callbacks and loggers",
    "link": "its network link",
}


def describe(straggler: Straggler, place: str, peer: str = "") -> str:
    """One sentence on a slow rank at a place. For a link, `peer` is the place at its other end."""
    rank, cause, excess = straggler.rank, straggler.cause, straggler.excess
    link = f" to {peer or straggler.peer}" if cause == "link" and (peer or straggler.peer) else ""
    return f"rank {rank} ({place}) holds up the others by {excess:.0%} with {_WORDS[cause]}{link}"


@dataclass(frozen=True)
class Slowest:
    """The rank that took longest over a whole run.

    Attributes:
        place: the rank with its place.
        text: one sentence.
        share: part of a step, 0 to 1, for which the others waited for it.
    """

    place: str
    text: str
    share: float


def hint(cause: Cause, one_machine: bool = False) -> str:
    """What to do about a slow rank. On one machine, whose cores all ranks share, no node and no network is to blame."""
    return ONE_MACHINE if one_machine and cause in ("compute", "link") else _HINTS[cause]
