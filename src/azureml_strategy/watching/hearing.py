"""Who the other ranks are, and when each was heard of last."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from azureml_strategy.watching.bounded import BoundedStore
from azureml_strategy.watching.machine import Member, is_gone
from azureml_strategy.watching.progress import START
from azureml_strategy.watching.report import Beat


class Hearing:
    """The other ranks' signs of life, as one rank sees them.

    Args:
        store: where they are.
        member: this process.
        world_size: number of ranks.
        neighbours: the ranks of this node, whose processes this one may see.
    """

    def __init__(self, store: BoundedStore, member: Member, world_size: int, neighbours: Sequence[int]) -> None:
        self._store = store
        self._own = member
        self._world_size = world_size
        # Rank 0 knows all; if all did, a start of a thousand ranks would be a million questions.
        self._met = range(world_size) if member.rank == 0 else sorted({0, *neighbours})
        self._heard: dict[int, tuple[str, float]] = {}
        self.members: dict[int, Member] = {member.rank: member}

    def introduce(self) -> None:
        """Say who this process is."""
        self._store.set(f"member/{self._own.rank}", json.dumps(asdict(self._own)))

    def listen(self, ranks: Iterable[int] | None = None) -> None:
        """Look for signs of life.

        Args:
            ranks: whose; by default everybody's.
        """
        others = [rank for rank in (range(self._world_size) if ranks is None else ranks) if rank != self._own.rank]
        self._meet([rank for rank in others if rank not in self.members])
        now = time.monotonic()
        for rank, said in zip(others, self._store.get_all([f"beat/{rank}" for rank in others]).values(), strict=True):
            if said is not None and said != self._heard.get(rank, ("", 0.0))[0]:
                self._heard[rank] = (said, now)

    def meet(self) -> None:
        """Learn who the others are that this rank may see, of those that have come."""
        self._meet([rank for rank in self._met if rank not in self.members])

    def beats(self) -> dict[int, Beat]:
        """The last sign of life of each rank that was heard of."""
        return {rank: Beat.from_json(said) for rank, (said, _) in self._heard.items()}

    def last(self, rank: int) -> Beat | None:
        """The last sign of life of one rank; None if it was not heard of.

        Args:
            rank: whose.
        """
        return Beat.from_json(self._heard[rank][0]) if rank in self._heard else None

    def silent(self, since: float) -> tuple[int, ...]:
        """The ranks that were heard of once, but not since then, and have not left in order.

        Args:
            since: on `time.monotonic`'s clock.
        """
        late = [rank for rank, (_, at) in self._heard.items() if at < since]
        return tuple(rank for rank in late if not self._is_over(rank))

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
        ended = [rank for rank, member in self.members.items() if is_gone(member) and not self._is_over(rank)]
        if ended:
            self.listen(ended)  # its last word may be new
        return tuple(rank for rank in ended if not self._is_over(rank))

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank has ended, for certain; False for one of another machine.

        Args:
            rank: whose.
        """
        return rank in self.members and is_gone(self.members[rank])

    def all_idle(self) -> bool:
        """Whether others are still there, and none of them has done anything for as long as it may."""
        there = [beat for beat in self.beats().values() if not beat.over]
        return bool(there) and all(beat.idle_s > beat.limit_s for beat in there)

    def all_over(self) -> bool:
        """Whether all ranks that were heard of have left in order."""
        return all(beat.over for beat in self.beats().values())

    def _is_over(self, rank: int) -> bool:
        beat = self.last(rank)
        return beat is not None and beat.over

    def _allowed_s(self, rank: int, after_s: float) -> float:
        beat = self.last(rank)
        return max(after_s, beat.limit_s) if beat is not None and beat.phase == START else after_s

    def _meet(self, ranks: list[int]) -> None:
        found = self._store.get_all([f"member/{rank}" for rank in ranks])
        self.members |= {
            rank: Member(**json.loads(said)) for rank, said in zip(ranks, found.values(), strict=True) if said
        }
