"""Decides from the times of all ranks which of them hold up the others, and by what.

Ranks that wait for one another take equally long for a step. So each rank's own times count, without its waits: what it
computes, its wait for data, and its callbacks. A rank is slow if one of these takes longer than on the other ranks.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Cause = Literal["compute", "data", "callbacks", "link"]

# A rank is named if it was slow in so many of the last windows. One slow window may be a garbage collection, or a
# neighbour on the machine.
SLOW_WINDOWS, LAST_WINDOWS = 3, 4
# What is seen over a whole run: from this excess on, in this share of its windows.
_SEEN_EXCESS, _SEEN_SHARE = 0.05, 0.75
# A slow link shows by two thirds: the acknowledgements of the other end's data, which come back over it, are late as
# well (benchmarks/slow_ranks.py).
_SHOWN: Mapping[Cause, float] = {"compute": 1.0, "data": 1.0, "callbacks": 1.0, "link": 2 / 3}
_CAUSES: tuple[Cause, ...] = get_args(Cause)
# Shorter delays of a step are noise of the operating system.
_SHORTEST_S = 0.002


@dataclass(frozen=True)
class RankWindow:
    """The times of one rank in a window: medians over its steps, in seconds a step.

    Attributes:
        step: the step at which the window ended.
        compute_s: forward, backward and optimizer, without waiting.
        data_wait_s: waiting for a batch.
        callbacks_s: callbacks, loggers and the rest of the loop.
        communication_s: waiting for other ranks.
        link_s: time that its connections had bytes under way which the network had not taken yet; None before it is
            known.
        peer: address at the other end of the busiest one.
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
        """All that the others may wait for."""
        return self.compute_s + self.data_wait_s + self.callbacks_s

    @property
    def whole_s(self) -> float:
        """The step."""
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
class SlowRank:
    """A rank that holds up the others.

    Attributes:
        rank: the global rank.
        cause: what it is slow at.
        excess: by how much it prolongs the step; 0.3 is 30 %.
        peer: for a link, the address at its other end.
    """

    rank: int
    cause: Cause
    excess: float
    peer: str = ""


class SlowRanks:
    """Compares the ranks, window by window.

    Args:
        threshold: the excess from which on a rank counts as slow; two thirds of it for a link.
    """

    def __init__(self, threshold: float = 0.15) -> None:
        self._threshold = threshold
        self._windows: Counter[Cause] = Counter()
        self._recent: deque[set[tuple[int, Cause]]] = deque(maxlen=LAST_WINDOWS)
        self._named: set[tuple[int, Cause]] = set()
        self._excesses: dict[tuple[int, Cause], list[float]] = defaultdict(list)

    def add(self, windows: Sequence[RankWindow]) -> list[SlowRank]:
        """Compare the ranks in one more window.

        Args:
            windows: of all ranks, in their order.

        Returns:
            The ranks that are named now, since they were slow in several windows. Each is named once, and again only
            after it was not slow any more.
        """
        self._windows.update(cause for cause in _CAUSES if _is_known(windows, cause))
        found = {(each.rank, each.cause): each for each in compare(windows)}
        for key, each in found.items():
            if each.excess >= _SEEN_EXCESS * _SHOWN[each.cause]:
                self._excesses[key].append(each.excess)
        slow = {key for key, each in found.items() if each.excess >= self._threshold * _SHOWN[each.cause]}
        self._recent.append(slow)
        counts = Counter(key for each in self._recent for key in each)
        self._named = {key for key in self._named if counts[key]}
        new = [key for key in slow if counts[key] >= SLOW_WINDOWS and key not in self._named]
        self._named |= set(new)
        return sorted((found[key] for key in new), key=lambda each: -each.excess)

    @property
    def slow(self) -> set[tuple[int, Cause]]:
        """The ranks that are slow at present, each with what it is slow at."""
        return set(self._named)

    def seen(self) -> list[SlowRank]:
        """The ranks that took longer in most windows of the run, also if by too little to be named; the worst first."""
        often = {key: each for key, each in self._excesses.items() if len(each) >= _SEEN_SHARE * self._windows[key[1]]}
        ranks = [SlowRank(rank, cause, statistics.median(each)) for (rank, cause), each in often.items()]
        return sorted(ranks, key=lambda each: -each.excess)


def compare(windows: Sequence[RankWindow]) -> Iterator[SlowRank]:
    """Yield by how much each rank exceeds the median of the other ranks of its group, where it does."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, window in enumerate(windows):
        groups[window.group].append(rank)
    for members in groups.values():
        if len(members) > 1:
            yield from _compare([(rank, windows[rank]) for rank in members])


def _compare(members: Sequence[tuple[int, RankWindow]]) -> Iterator[SlowRank]:
    whole = statistics.median(window.whole_s for _, window in members)
    own = [window.own_s for _, window in members]
    for cause in _CAUSES:
        known = [(rank, window, value) for rank, window in members if (value := window.of(cause)) is not None]
        if len(known) < len(members):
            continue
        values = [value for _, _, value in known]
        for rank, window, value in known:
            excess_s = value - _median_without(values, value)
            # What the step would take without this delay; ranks that rarely meet do not wait for each other in it.
            usual = max(whole - excess_s, _median_without(own, window.own_s))
            if excess_s >= _SHORTEST_S and usual > 0:
                yield SlowRank(rank, cause, excess_s / usual, window.peer if cause == "link" else "")


def _is_known(windows: Sequence[RankWindow], cause: Cause) -> bool:
    return all(window.of(cause) is not None for window in windows)


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
_WORDS: Mapping[Cause, str] = {
    "compute": "computing",
    "data": "waiting for its data",
    "callbacks": "its callbacks and loggers",
    "link": "its network link",
}


def describe(slow: SlowRank, place: str, peer: str = "") -> str:
    """One sentence on a slow rank.

    Args:
        slow: the rank.
        place: its host, node and device.
        peer: for a link, the place at its other end.
    """
    link = f" to {peer or slow.peer}" if slow.cause == "link" and (peer or slow.peer) else ""
    return f"rank {slow.rank} ({place}) holds up the others by {slow.excess:.0%} with {_WORDS[slow.cause]}{link}"


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


def hint(cause: Cause) -> str:
    """What to do about it."""
    return _HINTS[cause]
