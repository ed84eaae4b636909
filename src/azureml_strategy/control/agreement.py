"""Ranks agree on a step at which all of them stop, and then on whether to end or to go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from torch.distributed import Store  # type: ignore[attr-defined]

# One step may be under way, and the next one begun, before the main thread looks at the promise.
_MARGIN_STEPS = 2

State = Literal["leaving", "waiting", "free"]
_BEAT_SECONDS = 0.2
# A rank that has said nothing for so long is gone, with its machine.
_GONE_SECONDS = 30.0


class StopAgreement:
    """Finds one step for all ranks to stop at, once any of them has a reason.

    A collective in each step would tie the ranks' hosts together, and a signal handler must not talk to anybody. So
    a thread of each rank polls the rendezvous store. When a rank has a reason, each thread promises a step that its
    main thread will not pass before all have promised; the largest promise is the step. Main threads only count, and
    wait only when they reach their own promise first: the other threads promise whatever their main threads wait for.

    Args:
        store: shared by the ranks; used by the thread only, until the ranks have stopped.
        rank: this process's global rank.
        world_size: number of ranks.
        reason: why this rank wants to stop, None as long as it does not; asked on the thread.
        interval_s: pause between two looks at the store, in seconds.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, reason: Callable[[], str | None], interval_s: float = 0.5
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._own_reason = reason
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._steps = 0
        self._promise: int | None = None
        self._stop_at: int | None = None
        self._decided = threading.Event()
        self._closing = threading.Event()
        self.reason = ""
        self._thread = threading.Thread(target=self._run, name="stop-agreement", daemon=True)
        self._thread.start()

    def step_done(self) -> bool:
        """Count a step of this rank; whether it is the one to stop after, the same one on all ranks.

        From then on `reason` says, the same on all ranks, why.
        """
        with self._lock:
            self._steps += 1
            must_wait = self._promise is not None and self._steps >= self._promise
        if must_wait:
            self._decided.wait()
        return self._stop_at is not None and self._steps >= self._stop_at

    def close(self) -> None:
        """End the thread; one that waits for a rank that is gone is left behind."""
        self._closing.set()
        self._thread.join(timeout=2 * self._interval_s)

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._interval_s):
                reason = self._own_reason()
                if reason is not None:
                    self._store.set("asked", reason)
                if self._store.check(["asked"]):
                    self._stop_at = self._agree()
                    return
        except RuntimeError:
            # The store is gone: rank 0 has ended, and with it the run. The main thread meets that by itself.
            return
        finally:
            self._decided.set()

    def _agree(self) -> int:
        with self._lock:
            self._promise = self._steps + _MARGIN_STEPS
        self._store.set(f"promise/{self._rank}", str(self._promise))
        if self._rank == 0:
            promises = [int(self._store.get(f"promise/{rank}")) for rank in range(self._world_size)]
            # One value for both: a rank that asks meanwhile could change the reason under the others.
            self._store.set("stop", f"{max(promises)} {self._store.get('asked').decode()}")
        step, _, self.reason = self._store.get("stop").decode().partition(" ")
        return int(step)


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
