"""Who the other ranks are, and when each was heard of last."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from azureml_strategy.network.machine import Member, is_gone
from azureml_strategy.watching.bounded import BoundedStore
from azureml_strategy.watching.progress import START
from azureml_strategy.watching.report import Beat


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
