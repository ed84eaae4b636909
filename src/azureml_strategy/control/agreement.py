"""Lets the ranks agree on a step at which all of them stop, and then on whether to end or to go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from torch.distributed import Store  # type: ignore[attr-defined]

# The main thread may finish a step and begin the next before it sees the promise.
_MARGIN_STEPS = 2

State = Literal["leaving", "waiting", "free"]
_HEARTBEAT_SECONDS = 0.2
# After this time without a heartbeat, a rank counts as gone, with its machine.
_GONE_SECONDS = 30.0


class StopAgreement:
    """Finds one step at which all ranks stop, once any of them has a reason.

    A collective in each step would make the hosts of all ranks wait for one another, and a signal handler must not
    communicate. So a thread of each rank polls the rendezvous store. When a rank has a reason, each thread promises a
    step that its main thread will not pass before all ranks have promised. The ranks stop at the largest promise. Main
    threads only count steps. They wait only if they reach their own promise before the decision. This cannot deadlock:
    the threads promise even while their main threads wait.

    Args:
        store: shared by the ranks. Until the ranks have stopped, only the thread uses it.
        rank: this process's global rank.
        world_size: number of ranks.
        reason: returns why this rank wants to stop, or None. The thread calls it.
        interval_s: pause between two polls of the store, in seconds.

    Attributes:
        reason: why the ranks stop, the same on all of them; empty before the decision.
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
        """Count a step of this rank.

        Returns:
            Whether to stop after this step, which is the same step on all ranks. If so, `reason` gives the reason.
        """
        with self._lock:
            self._steps += 1
            must_wait = self._promise is not None and self._steps >= self._promise
        if must_wait:
            self._decided.wait()
        return self._stop_at is not None and self._steps >= self._stop_at

    def close(self) -> None:
        """End the thread. If it waits for a rank that is gone, leave it behind."""
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
            # The store is gone: rank 0 has ended, and with it the run. The main thread will notice that itself.
            return
        finally:
            self._decided.set()

    def _agree(self) -> int:
        with self._lock:
            self._promise = self._steps + _MARGIN_STEPS
        self._store.set(f"promise/{self._rank}", str(self._promise))
        if self._rank == 0:
            promises = [int(self._store.get(f"promise/{rank}")) for rank in range(self._world_size)]
            # Step and reason share one value, because another rank may overwrite `asked` in the meantime.
            self._store.set("stop", f"{max(promises)} {self._store.get('asked').decode()}")
        step, _, self.reason = self._store.get("stop").decode().partition(" ")
        return int(step)


class StopBarrier:
    """The stop barrier: all ranks have stopped at one step and wait for the decision to end or to go on.

    Each rank repeatedly writes its state as a heartbeat: `leaving` after SIGTERM, `waiting` while its machine is about
    to be taken away, `free` otherwise. Rank 0 decides for all. If any rank is leaving or silent, all end. When all are
    free, training goes on. The ranks must wait here: if a process exited by itself, the job would count as completed or
    failed before Azure ML sees that its node is gone.

    Args:
        store: shared by the ranks; nothing else uses its keys.
        rank: this process's global rank.
        world_size: number of ranks.
        state: returns the state of this rank.
        gone_s: after how many seconds without a heartbeat a rank counts as gone.
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
        """Wait for the decision, and return whether training goes on. False also if rank 0 is gone with its store."""
        try:
            return self._verdict() == "on"
        except RuntimeError:
            return False

    def _verdict(self) -> str:
        heartbeat = 0
        while not self._store.check(["verdict"]):
            self._store.set(f"state/{self._rank}", f"{self._state()} {heartbeat}")
            decided = self._decide() if self._rank == 0 else None
            if decided is not None:
                self._store.set("verdict", decided)
            else:
                time.sleep(_HEARTBEAT_SECONDS)
            heartbeat += 1
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
