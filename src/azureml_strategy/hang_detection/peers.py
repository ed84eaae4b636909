"""What ranks tell one another, heartbeats, alarms and reports, and when each was heard of last."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

from azureml_strategy.control.channel import BoundedStore
from azureml_strategy.control.process import Member, Sight, is_gone, is_seen, look_for
from azureml_strategy.hang_detection.flight_recorder import Collective
from azureml_strategy.hang_detection.main_thread import START, Frames

# `ended`: by an exception. `gone`: its process. `vanished`: its node. `lost`: by what a collective says. `unserved`:
# rank 0's store. All of these are for ever; `silent` and `stalled` may pass.
Kind = Literal["ended", "gone", "vanished", "lost", "unserved", "silent", "stalled"]
PASSING: tuple[Kind, ...] = ("silent", "stalled")

_MOST_AT_ONCE = 64


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    Attributes:
        count: how many before.
        at: when, in seconds since 1970.
        over: whether the rank has left the run in order, and sends no more.
        phase: what its main thread does.
        step: its optimizer steps.
        idle_s: seconds since its main thread's last note.
        limit_s: how many it may take.
        entered: operations entered in each process group.
    """

    count: int
    at: float
    over: bool
    phase: str
    step: int
    idle_s: float
    limit_s: float
    entered: dict[str, int]

    def to_json(self) -> str:
        """The beat as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Beat:
        """The beat from its text."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Alarm:
    """What is wrong, as the first that noticed it says.

    Attributes:
        kind: what has happened.
        ranks: to which ranks; none where the reports must show it.
        text: the exception, or for how long, or who serves the store.
    """

    kind: Kind
    ranks: tuple[int, ...]
    text: str

    def to_json(self) -> str:
        """The alarm as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Alarm:
        """The alarm from its text."""
        values: dict[str, Any] = json.loads(text)
        return cls(values["kind"], tuple(values["ranks"]), values["text"])


@dataclass(frozen=True)
class Report:
    """Where a rank is when there is an alarm.

    Attributes:
        beat: its step, phase and idle time.
        collectives: of each process group the one it is in, or was in last; none without a flight recorder.
        stack: the innermost Python frames of its main thread, innermost first.
        place: the one of them to look at.
        communicates: whether that thread is inside a collective.
        failed: whether that thread has met an exception.
    """

    beat: Beat
    collectives: list[Collective]
    stack: Frames
    place: str
    communicates: bool
    failed: bool

    def to_json(self) -> str:
        """The report as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report from its text."""
        values: dict[str, Any] = json.loads(text)
        collectives = [Collective(**each | {"ranks": tuple(each["ranks"])}) for each in values["collectives"]]
        frames = [(file, number, name) for file, number, name in values["stack"]]
        return cls(**values | {"beat": Beat(**values["beat"]), "collectives": collectives, "stack": frames})

    @property
    def waits_in(self) -> Collective | None:
        """The collective that is not over, the first one if it is in several."""
        open_ones = [each for each in self.collectives if not each.over]
        return min(open_ones, key=lambda each: each.entered_at, default=None)

    @property
    def last(self) -> Collective | None:
        """The collective entered last of those shown."""
        return max(self.collectives, key=lambda each: each.entered_at, default=None)


class Hearing:
    """The other ranks' signs of life, as one rank sees them.

    All have just met: that counts as the first sign of life of each.

    Args:
        store: where the others are.
        rank: this process's.
        members: all ranks' processes.
        start_limit_s: how long a rank may take to start, in seconds.
    """

    def __init__(self, store: BoundedStore, rank: int, members: Mapping[int, Member], start_limit_s: float) -> None:
        self._store = store
        self._others = [other for other in members if other != rank]
        met = Beat(0, time.time(), False, START, 0, 0.0, start_limit_s, {}).to_json()
        self._heard = dict.fromkeys(self._others, (met, time.monotonic()))
        self._listened: set[int] = set()
        self._rank = rank
        self._known: set[int] = set()
        self.members = members

    def listen(self, ranks: Iterable[int] | None = None) -> None:
        """Look for signs of life.

        Args:
            ranks: whose; by default everybody's.
        """
        asked = self._others if ranks is None else [rank for rank in ranks if rank in self._heard]
        # One that nobody has listened to was not silent.
        for rank in asked:
            if rank not in self._listened:
                self._heard[rank] = (self._heard[rank][0], time.monotonic())
        self._listened = set(asked)
        self._hear(asked)

    def beats(self) -> dict[int, Beat]:
        """The last sign of life of each other rank."""
        return {rank: Beat.from_json(said) for rank, (said, _) in self._heard.items()}

    def last(self, rank: int) -> Beat:
        """The last sign of life of another rank.

        Args:
            rank: whose.
        """
        return Beat.from_json(self._heard[rank][0])

    def silent(self, since: float) -> tuple[int, ...]:
        """The ranks that were listened to, but not heard since then, and have not left in order.

        Args:
            since: on `time.monotonic`'s clock.
        """
        return tuple(
            rank for rank in sorted(self._listened) if self._heard[rank][1] < since and not self._is_over(rank)
        )

    def dead(self, after_s: float) -> tuple[int, ...]:
        """As `silent`, but with patience for those that start: code that loads a model may hold Python's lock for long.

        Args:
            after_s: how long the silence must last, in seconds.
        """
        now = time.monotonic()
        return tuple(
            rank for rank in self.silent(now - after_s) if now - self._heard[rank][1] > self._allowed_s(rank, after_s)
        )

    def sights(self, ranks: Collection[int]) -> dict[int, Sight]:
        """Whether the processes of some ranks live, as this machine's kernel or theirs say.

        Args:
            ranks: whose.
        """
        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
            found = dict(zip(ranks, pool.map(lambda rank: look_for(self.members[rank]), ranks), strict=True))
        self._known |= {rank for rank, sight in found.items() if sight == "alive" or is_seen(self.members[rank])}
        # Of one that has never answered, it may be a firewall that refuses or says nothing.
        return {rank: sight if rank in self._known else "unknown" for rank, sight in found.items()}

    def acquaint(self) -> None:
        """Ask for the processes that this rank listens to while they are certain to live."""
        self.sights(self._others if self._rank == 0 else [0])

    def vanished(self, sights: Mapping[int, Sight], after_s: float, idle_s: float) -> tuple[int, ...]:
        """The ranks of nodes that have vanished, as far as anyone can know, while all others have waited.

        Args:
            sights: of the ranks that are silent.
            after_s: how long all of a node's processes must have been silent, in seconds.
            idle_s: how long the others must have done nothing, in seconds.
        """
        if not all(each.over or each.idle_s > idle_s for rank, each in self.beats().items() if rank not in sights):
            return ()
        since = time.monotonic() - after_s
        lost = {rank for rank, sight in sights.items() if sight == "unreachable" and self._heard[rank][1] < since}
        speaking = {self._node(rank) for rank in self._others if rank not in lost and not self._is_over(rank)}
        return tuple(sorted(rank for rank in lost if self._node(rank) not in speaking))

    def restart(self, silent: Collection[int]) -> None:
        """Begin to listen anew: while they have answered an alarm, the others gave no signs of life.

        Args:
            silent: the ranks that were silent before.
        """
        self._listened &= set(silent)

    def gone(self) -> tuple[int, ...]:
        """The ranks of this machine whose processes have ended, but not in order."""
        ended = [rank for rank in self._others if self.has_ended(rank) and not self._is_over(rank)]
        if ended:
            self._hear(ended)  # its last word may be new
        return tuple(rank for rank in ended if not self._is_over(rank))

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank has ended, for certain; False for one of another machine.

        Args:
            rank: whose.
        """
        return is_gone(self.members[rank])

    def all_idle(self) -> bool:
        """Whether others are still there, and none of them has done anything for as long as it may."""
        there = [beat for beat in self.beats().values() if not beat.over]
        return bool(there) and all(beat.idle_s > beat.limit_s for beat in there)

    def all_over(self) -> bool:
        """Whether nobody is left: all others have left in order, or their processes have ended."""
        return all(beat.over or self.has_ended(rank) for rank, beat in self.beats().items())

    def _node(self, rank: int) -> tuple[int, str]:
        return self.members[rank].node, self.members[rank].host

    def _is_over(self, rank: int) -> bool:
        return self.last(rank).over

    def _allowed_s(self, rank: int, after_s: float) -> float:
        beat = self.last(rank)
        return max(after_s, beat.limit_s) if beat.phase == START else after_s

    def _hear(self, ranks: list[int]) -> None:
        now = time.monotonic()
        for rank, said in zip(ranks, self._store.get_all([f"beat/{rank}" for rank in ranks]).values(), strict=True):
            if said is not None and said != self._heard[rank][0]:
                self._heard[rank] = (said, now)
