"""Lets the ranks agree on a step at which all of them stop, and then on whether to end or to go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

from azureml_strategy.control.channel import StoreLostError
from azureml_strategy.control.store import ControlStore, Patience

# The main thread may finish a step and begin the next before it sees the promise.
_MARGIN_STEPS = 2
# Time between two looks at the store while main threads may wait for the decision.
_DECIDING_SECONDS = 0.1
# After this time of waiting, a main thread sees whether the store answers.
_WAIT_SECONDS = 60.0
# Stands for the step in a decision not to stop.
_NEVER = "never"

State = Literal["leaving", "waiting", "free"]
_POLL_SECONDS = 0.2
# After this time without a heartbeat, a rank counts as gone, with its machine.
_GONE_SECONDS = 30.0


class StopAgreement:
    """Finds one step at which all ranks stop, once any of them has a reason.

    A collective in each step would make the hosts of all ranks wait for one another, and a signal handler must not
    communicate. So the control channel's thread of each rank looks at the store at intervals. When a rank has a reason,
    each thread promises a step that its main thread will not pass before all ranks have promised. The ranks stop at the
    largest promise. Main threads only count steps. They wait only if they reach their own promise before the decision.
    This cannot deadlock: the threads promise even while their main threads wait. And the wait ends: if a rank loses the
    store, leaves or falls silent, the decision is not to stop, and all main threads go on.

    Args:
        store: shared by the ranks. Nothing else uses its keys.
        reason: returns why this rank wants to stop, or None. The channel's thread calls it.
        interval_s: pause between two looks at the store, in seconds.

    Attributes:
        reason: why the ranks stop, the same on all of them; empty before the decision.
        error: why there is no agreement, or None.
    """

    def __init__(self, store: ControlStore, reason: Callable[[], str | None], interval_s: float = 0.5) -> None:
        self._store = store
        self._own_reason = reason
        self._lock = threading.Lock()
        self._steps = 0
        self._promise: int | None = None
        self._stop_at: int | None = None
        self._decided = threading.Event()
        self._patience = Patience(store)
        self._awaited = _awaited(store)
        self.reason = ""
        self.error: str | None = None
        store.channel.every(interval_s, self._look)

    def step_done(self) -> bool:
        """Count a step of this rank. Return whether to stop after it, which is the same step on all ranks."""
        with self._lock:
            self._steps += 1
            must_wait = self._promise is not None and self._steps >= self._promise
        if must_wait:
            self._wait()
        return self._stop_at is not None and self._steps >= self._stop_at

    def close(self) -> None:
        """End the agreement. No rank waits for this one any longer."""
        self._store.channel.no_more(self._look)
        if not self._decided.is_set():
            self._store.set_for_sure("stop", f"{_NEVER} rank {self._store.rank} has left")
        self._decided.set()

    def _wait(self) -> None:
        while not self._decided.wait(_WAIT_SECONDS):
            try:
                self._store.get("stop")  # replaces a connection on which the channel's thread waits in vain
            except StoreLostError as lost:
                self._follow(self._refusal(lost))

    def _look(self) -> None:
        try:
            decision = self._decision()
        except StoreLostError as lost:
            if self._promise is None:
                return  # nobody waits: look again later
            decision = self._refusal(lost)
        if decision is not None:
            self._follow(decision)

    def _refusal(self, lost: StoreLostError) -> str:
        """Decide not to stop. The other ranks learn of it, at the latest when the store answers again."""
        decision = f"{_NEVER} rank {self._store.rank}: {lost}"
        self._store.set_for_sure("stop", decision)
        return decision

    def _decision(self) -> str | None:
        if self._promise is None:
            self._ask()
            if self._store.get("asked") is None:
                return None
            self._make_promise()
        decision = self._store.get("stop") or (self._decide() if self._store.rank == 0 else None)
        if decision is None and (error := self._patience.end(self._awaited)) is not None:
            decision = self._store.set_first("stop", f"{_NEVER} {error}")
        return decision

    def _follow(self, decision: str) -> None:
        step, _, text = decision.partition(" ")
        if step == _NEVER:
            self.error = text
        else:
            self.reason, self._stop_at = text, int(step)
        self._store.channel.no_more(self._look)
        self._decided.set()

    def _ask(self) -> None:
        reason = self._own_reason()
        if reason is not None:
            self._store.set_first("asked", reason)

    def _make_promise(self) -> None:
        with self._lock:
            if self._promise is None:
                self._promise = self._steps + _MARGIN_STEPS
        self._store.set(f"promise/{self._store.rank}", str(self._promise))
        self._store.channel.every(_DECIDING_SECONDS, self._look)

    def _decide(self) -> str | None:
        """Return the decision if all ranks have promised. Only rank 0 decides."""
        promises = self._store.get_if_all([f"promise/{rank}" for rank in range(self._store.world_size)])
        if promises is None:
            return None
        return self._store.set_first("stop", f"{max(map(int, promises))} {self._store.get('asked')}")


class StopBarrier:
    """The stop barrier: all ranks have stopped at one step and wait for the decision to end or to go on.

    Each rank writes its state whenever it changes: `leaving` after SIGTERM, `waiting` while its machine is about to be
    taken away, `free` otherwise. Rank 0 decides for all. If any rank is leaving or silent, all end. When all are free,
    training goes on. The ranks must wait here: if a process exited by itself, the job would count as completed or
    failed before Azure ML sees that its node is gone. A rank counts as gone after `gone_s` seconds without a heartbeat.
    """

    def __init__(self, store: ControlStore, state: Callable[[], State], gone_s: float = _GONE_SECONDS) -> None:
        self._store = store
        self._state = state
        self._patience = Patience(store, gone_s)
        self._awaited = _awaited(store)
        self._said: State | None = None

    def goes_on(self) -> bool:
        """Wait for the decision, and return whether training goes on. False also if rank 0 is gone with its store."""
        try:
            return self._verdict() == "on"
        except StoreLostError:
            return False

    def _verdict(self) -> str:
        while True:
            self._tell(self._state())
            verdict = self._store.get("verdict") or (self._decide() if self._store.rank == 0 else None)
            if verdict is not None:
                return verdict
            if self._patience.end(self._awaited) is not None:
                return self._store.set_first("verdict", "end")
            self._store.pause(_POLL_SECONDS)

    def _tell(self, state: State) -> None:
        if state != self._said:
            self._store.set(f"state/{self._store.rank}", state)
            self._said = state

    def _decide(self) -> str | None:
        states = set(self._store.get_all([f"state/{rank}" for rank in range(self._store.world_size)]).values())
        if "leaving" in states or states == {"free"}:
            return self._store.set_first("verdict", "end" if "leaving" in states else "on")
        return None


def _awaited(store: ControlStore) -> Sequence[int]:
    """Return the ranks that this one waits for: rank 0 for all, and the others for its decision."""
    return range(1, store.world_size) if store.rank == 0 else [0]
