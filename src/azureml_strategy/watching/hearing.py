"""Who the other ranks are, and when each was heard of last."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict

from azureml_strategy.watching.bounded import BoundedStore
from azureml_strategy.watching.machine import Member, is_gone
from azureml_strategy.watching.report import Beat


class Hearing:
    """The other ranks' signs of life, as one rank sees them.

    Args:
        store: where they are.
        member: this process.
        world_size: number of ranks.
    """

    def __init__(self, store: BoundedStore, member: Member, world_size: int) -> None:
        self._store = store
        self._own = member
        self._world_size = world_size
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

    def meet_all(self) -> None:
        """Learn who the others are, of those that have come."""
        self._meet([rank for rank in range(self._world_size) if rank not in self.members])

    def beats(self) -> dict[int, Beat]:
        """The last sign of life of each rank that was heard of."""
        return {rank: Beat.from_json(said) for rank, (said, _) in self._heard.items()}

    def silent(self, since: float) -> tuple[int, ...]:
        """The ranks that were heard of once, but not since then, and have not left in order.

        Args:
            since: on `time.monotonic`'s clock.
        """
        late = [rank for rank, (_, at) in self._heard.items() if at < since]
        return tuple(rank for rank in late if not Beat.from_json(self._heard[rank][0]).over)

    def gone(self) -> tuple[int, ...]:
        """The ranks of this machine whose processes have ended, but not in order."""
        ended = [rank for rank, member in self.members.items() if is_gone(member)]
        if ended:
            self.listen(ended)  # its last word may be new
        return tuple(rank for rank in ended if rank not in self._heard or not self.beats()[rank].over)

    def all_idle(self) -> bool:
        """Whether no rank that is still there has done anything for as long as it may."""
        return all(beat.over or beat.idle_s > beat.limit_s for beat in self.beats().values())

    def _meet(self, ranks: list[int]) -> None:
        found = self._store.get_all([f"member/{rank}" for rank in ranks])
        self.members |= {
            rank: Member(**json.loads(said)) for rank, said in zip(ranks, found.values(), strict=True) if said
        }
