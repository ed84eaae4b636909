"""Ranks that have stopped together learn together whether to go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from torch.distributed import Store  # type: ignore[attr-defined]

State = Literal["leaving", "waiting", "free"]
_BEAT_SECONDS = 0.2
# A rank that has said nothing for so long is gone, with its machine.
_GONE_SECONDS = 30.0


class Standstill:
    """The time between a stop of all ranks and their end, or their going on.

    Each rank says again and again how it stands: `leaving` after SIGTERM, `waiting` while its machine is about to be
    taken away, `free` otherwise. Rank 0 decides for all: one that leaves or falls silent takes the others with it,
    and when all are free, training goes on. A process that ended by itself instead of waiting would be a job that
    has completed, or failed, before Azure ML sees that its node is gone.

    Args:
        store: shared by the ranks, with nothing else under its names.
        rank: this process's global rank.
        world_size: number of ranks.
        state: how this rank stands.
        gone_s: how long a rank may be silent, in seconds.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, state: Callable[[], State], gone_s: float = _GONE_SECONDS
    ) -> None:
        self._store = store
        self._rank = rank
        self._state = state
        self._gone_s = gone_s
        self._heard: dict[int, tuple[str, float]] = dict.fromkeys(range(world_size), ("", time.monotonic()))

    def goes_on(self) -> bool:
        """Wait for the decision; whether training goes on. False, too, when rank 0 is gone, and the store with it."""
        try:
            return self._verdict() == "on"
        except RuntimeError:
            return False

    def _verdict(self) -> str:
        beat = 0
        while not self._store.check(["verdict"]):
            self._store.set(f"state/{self._rank}", f"{self._state()} {beat}")
            decided = self._decide() if self._rank == 0 else None
            if decided is not None:
                self._store.set("verdict", decided)
            else:
                time.sleep(_BEAT_SECONDS)
            beat += 1
        return self._store.get("verdict").decode()

    def _decide(self) -> Literal["on", "end"] | None:
        now = time.monotonic()
        self._listen(now)
        states = {said.partition(" ")[0] for said, _ in self._heard.values()}
        silent = any(now - heard_at > self._gone_s for _, heard_at in self._heard.values())
        if "leaving" in states or silent:
            return "end"
        return "on" if states == {"free"} else None

    def _listen(self, now: float) -> None:
        for rank, (before, _) in self._heard.items():
            key = f"state/{rank}"
            said = self._store.get(key).decode() if self._store.check([key]) else ""
            if said != before:
                self._heard[rank] = (said, now)
