"""The messages between ranks (heartbeats, alarms, reports), and when each rank's last heartbeat arrived."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from typing_extensions import override

from azureml_strategy.control.process import Liveness, Member, check_liveness, is_gone, shares_process_table
from azureml_strategy.control.store import ControlStore
from azureml_strategy.hang_detection.flight_recorder import Collective
from azureml_strategy.hang_detection.main_thread import START, Frames

# `ended`: the rank raised an exception. `gone`: its process has ended. `vanished`: its node does not answer. `lost`: a
# collective says that its connection has ended. `unserved`: rank 0's store has ended. These are final; `silent` and
# `stalled` may pass.
Kind = Literal["ended", "gone", "vanished", "lost", "unserved", "silent", "stalled"]
PASSING: tuple[Kind, ...] = ("silent", "stalled")

_MOST_AT_ONCE = 64


@dataclass(frozen=True)
class Message:
    """What a rank writes for the others."""

    def to_json(self) -> str:
        """Return the message as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the message from its text."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Heartbeat(Message):
    """A heartbeat of one rank.

    Attributes:
        count: its number; 0 stands for the meeting of the ranks at the start.
        at: time in seconds since 1970.
        over: whether the rank has left the run in order and sends no more heartbeats.
        phase: what the main thread does.
        step: number of optimizer steps.
        idle_s: seconds since the main thread's last progress.
        limit_s: seconds that the main thread may go without progress.
        entered: number of operations entered in each process group.
    """

    count: int
    at: float
    over: bool
    phase: str
    step: int
    idle_s: float
    limit_s: float
    entered: dict[str, int]


@dataclass(frozen=True)
class Alarm(Message):
    """What is wrong, as seen by the rank that noticed it first.

    Attributes:
        kind: what has happened.
        ranks: the ranks that it has happened to; empty if only the reports can show them.
        text: the exception, how long it has lasted, or who serves the store.
    """

    kind: Kind
    ranks: tuple[int, ...]
    text: str

    @classmethod
    @override
    def from_json(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        return cls(values["kind"], tuple(values["ranks"]), values["text"])


@dataclass(frozen=True)
class Report(Message):
    """Where a rank is at the time of an alarm.

    Attributes:
        heartbeat: its step, phase and idle time.
        collectives: for each process group, the collective that the rank is in, or was in last; empty without a flight
            recorder.
        stack: the innermost Python frames of the main thread, innermost first.
        place: the frame to look at.
        communicates: whether the main thread is inside a collective.
        failed: whether the main thread has met an exception.
    """

    heartbeat: Heartbeat
    collectives: list[Collective]
    stack: Frames
    place: str
    communicates: bool
    failed: bool

    @classmethod
    @override
    def from_json(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        collectives = [Collective(**each | {"ranks": tuple(each["ranks"])}) for each in values["collectives"]]
        frames = [(file, number, name) for file, number, name in values["stack"]]
        return cls(
            **values | {"heartbeat": Heartbeat(**values["heartbeat"]), "collectives": collectives, "stack": frames}
        )

    @property
    def waits_in(self) -> Collective | None:
        """The collective that is not complete; if there are several, the one entered first."""
        open_ones = [each for each in self.collectives if not each.over]
        return min(open_ones, key=lambda each: each.entered_at, default=None)

    @property
    def last(self) -> Collective | None:
        """The collective of the report that was entered last."""
        return max(self.collectives, key=lambda each: each.entered_at, default=None)


class Peers:
    """The heartbeats of the other ranks, as one rank sees them.

    All ranks have just met, which counts as the first heartbeat of each. Until its next one, a rank may take
    `start_limit_s` to start.
    """

    def __init__(self, store: ControlStore, rank: int, members: Mapping[int, Member], start_limit_s: float) -> None:
        self._store = store
        self._others = [other for other in members if other != rank]
        initial = Heartbeat(0, time.time(), False, START, 0, 0.0, start_limit_s, {}).to_json()
        # Of each other rank: its last heartbeat, and when it was read.
        self._received = dict.fromkeys(self._others, (initial, time.monotonic()))
        self._polled: set[int] = set()
        self._rank = rank
        self._reachable: set[int] = set()
        self.members = members

    def listen(self, ranks: Iterable[int] | None = None) -> None:
        """Read new heartbeats of some ranks, by default all others."""
        polled = self._others if ranks is None else [rank for rank in ranks if rank in self._received]
        # A rank whose heartbeats were not read until now counts as silent only from now on.
        for rank in polled:
            if rank not in self._polled:
                self._received[rank] = (self._received[rank][0], time.monotonic())
        self._polled = set(polled)
        self._receive(polled)

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each other rank."""
        return {rank: Heartbeat.from_json(text) for rank, (text, _) in self._received.items()}

    def last(self, rank: int) -> Heartbeat:
        """Return the last heartbeat of another rank."""
        return Heartbeat.from_json(self._received[rank][0])

    def silent(self, since: float) -> tuple[int, ...]:
        """Return the ranks that were read without a new heartbeat since a time, and that have not left in order."""
        return tuple(
            rank for rank in sorted(self._polled) if self._received[rank][1] < since and not self._is_over(rank)
        )

    def dead(self, after_s: float) -> tuple[int, ...]:
        """Like `silent` for `after_s`, but a starting rank gets more time: loading a model may long hold the GIL."""
        now = time.monotonic()

        def allowed_s(heartbeat: Heartbeat) -> float:
            return max(after_s, heartbeat.limit_s) if heartbeat.phase == START else after_s

        silent = self.silent(now - after_s)
        return tuple(rank for rank in silent if now - self._received[rank][1] > allowed_s(self.last(rank)))

    def liveness_of(self, ranks: Collection[int]) -> dict[int, Liveness]:
        """Check the liveness of processes: ask this machine's kernel, or the kernel of theirs."""
        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
            found = dict(zip(ranks, pool.map(lambda rank: check_liveness(self.members[rank]), ranks), strict=True))
        self._reachable |= {
            rank for rank, liveness in found.items() if liveness == "alive" or shares_process_table(self.members[rank])
        }
        # If a process has never answered, a firewall may be what refuses or drops the connection.
        return {rank: liveness if rank in self._reachable else "unknown" for rank, liveness in found.items()}

    def probe(self) -> None:
        """Learn which of the processes that this rank listens to answer a check. Call it while all of them live."""
        self.liveness_of(self._others if self._rank == 0 else [0])

    def vanished(self, liveness_of: Mapping[int, Liveness], after_s: float, idle_s: float) -> tuple[int, ...]:
        """Return the ranks of nodes that have vanished, as far as that can be known.

        All processes of such a node have been silent for `after_s`, and all other ranks have been idle for `idle_s`.
        """
        others = [each for rank, each in self.heartbeats().items() if rank not in liveness_of]
        if not all(each.over or each.idle_s > idle_s for each in others):
            return ()
        since = time.monotonic() - after_s
        lost = {
            rank
            for rank, liveness in liveness_of.items()
            if liveness == "unreachable" and self._received[rank][1] < since
        }
        alive = {self._node(rank) for rank in self._others if rank not in lost and not self._is_over(rank)}
        return tuple(sorted(rank for rank in lost if self._node(rank) not in alive))

    def restart(self, silent: Collection[int]) -> None:
        """Restart the silence timers of all but the given ranks: ranks that answer an alarm send no heartbeats."""
        self._polled &= set(silent)

    def gone(self) -> tuple[int, ...]:
        """Return the ranks of this machine whose processes have ended without leaving in order."""
        ended = [rank for rank in self._others if self.has_ended(rank) and not self._is_over(rank)]
        if ended:
            self._receive(ended)  # its last heartbeat may be unread
        return tuple(rank for rank in ended if not self._is_over(rank))

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank has certainly ended; False for a process on another machine."""
        return is_gone(self.members[rank])

    def all_idle(self) -> bool:
        """Whether there are other ranks left, and each has been idle for longer than its limit."""
        there = [heartbeat for heartbeat in self.heartbeats().values() if not heartbeat.over]
        return bool(there) and all(heartbeat.idle_s > heartbeat.limit_s for heartbeat in there)

    def all_over(self) -> bool:
        """Whether no other rank is left: each has left in order, or its process has ended."""
        return all(heartbeat.over or self.has_ended(rank) for rank, heartbeat in self.heartbeats().items())

    def _node(self, rank: int) -> tuple[int, str]:
        return self.members[rank].node, self.members[rank].host

    def _is_over(self, rank: int) -> bool:
        return self.last(rank).over

    def _receive(self, ranks: list[int]) -> None:
        now = time.monotonic()
        for rank, text in zip(ranks, self._store.get_all([f"beat/{rank}" for rank in ranks]).values(), strict=True):
            if text is not None and text != self._received[rank][0]:
                self._received[rank] = (text, now)
