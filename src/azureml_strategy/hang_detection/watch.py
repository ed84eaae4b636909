"""The watch thread of a rank: it sends heartbeats, reads those of the other ranks, and raises alarms."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType

from azureml_strategy.control.channel import StoreLostError
from azureml_strategy.control.process import Liveness, Member, accept_probes, why_silent
from azureml_strategy.control.store import ControlStore
from azureml_strategy.hang_detection import flight_recorder
from azureml_strategy.hang_detection.alarm import AlarmHandler, HangReporter, Outcome, say, store_server
from azureml_strategy.hang_detection.main_thread import (
    CHECKPOINT,
    END,
    STOP_BARRIER,
    Progress,
    communicates,
    frames_of,
    is_inside,
    trainer_frame,
)
from azureml_strategy.hang_detection.peers import PASSING, Alarm, Heartbeat, Peers

# After a connection to a rank has closed, the rank counts as gone once this many heartbeats are missing.
_HEARTBEATS_MISSING = 3
# After a final verdict, the main thread has this long to fail by itself: gloo reports a lost rank at once, NCCL never.
_STUCK_SECONDS = 30.0
# After an exception, the main thread may still wait for a checkpoint; its writer allows a minute for that.
_LEAVE_SECONDS = 120.0
_FAIL_SECONDS = 60.0
# Time for the others to read the last heartbeat. Otherwise they would take this process for one that has died.
_CLOSE_SECONDS = 10.0
_LAST_READ_PAUSE_SECONDS = 0.2
# A node is lost after _VANISHED_TIMES x `dead_after_s` of silence; it is checked _ASKED_TIMES in each `dead_after_s`.
_VANISHED_TIMES, _ASKED_TIMES = 2, 4


@dataclass(frozen=True)
class Failure:
    """An exception on this rank's main thread.

    It is `of_others` if it only reports a closed connection, so that another rank is the cause.
    """

    text: str
    of_others: bool


class Watch:
    """Sends this rank's heartbeats, and raises an alarm when another rank falls silent or no rank makes progress.

    Rank 0 reads the heartbeats of all ranks. The other ranks read those of rank 0, and all others only when they have
    been idle for long. Each rank also checks the processes on its own machine. The rank that finds a problem writes an
    alarm into the store, and every rank answers with a report (`AlarmHandler`). If the verdict is final, the processes
    end. Otherwise the watch goes on, and reports the same problem again only after the ranks have made progress.

    Args:
        store: shared by the ranks; nothing else uses its keys. The watch closes it.
        members: the processes of all ranks, including this one.
        progress: the main thread's progress.
        step: returns the number of optimizer steps.
        main_thread: the main thread's `threading.get_ident`; that thread must be inside the Trainer's call.
        dead_after_s: seconds of silence after which another rank's liveness is checked, if this rank has been idle for
            that long too.
        beat_s: seconds between two heartbeats.
        reporter: reports the verdict, and keeps it and this rank's flight recorder.
        end: ends the process when its main thread cannot; its argument is that thread's idle time in seconds.
        kill: whether any alarm ends the job.
    """

    def __init__(
        self,
        store: ControlStore,
        members: Mapping[int, Member],
        progress: Progress,
        step: Callable[[], int],
        main_thread: int,
        dead_after_s: float,
        beat_s: float,
        reporter: HangReporter,
        end: Callable[[float], None],
        kill: bool = False,
    ) -> None:
        self._store = store
        self._rank = store.rank
        self._progress = progress
        self._step = step
        self._main_thread = main_thread
        # The frame of this very call: a script may catch its exception and call the Trainer again.
        self._inside: FrameType | None = trainer_frame(main_thread)
        self._dead_after_s, self._beat_s = dead_after_s, beat_s
        self._end = end
        self._peers = Peers(store, store.rank, members, progress.limit_s)
        self._alarm_handler = AlarmHandler(store, self._peers, main_thread, reporter, kill)
        self._kill = kill
        # The reported hang that has not passed: time, silent ranks, whether it was a stall, whether this rank judged.
        self._reported_at: float | None = None
        self._silent: set[int] = set()
        self._stall_reported = self._judged = False
        self._asked_at = float("-inf")
        self._lost_at: float | None = None
        self._heartbeats = 0
        self._done: tuple[int, dict[str, int]] | None = None
        self._failure: Failure | None = None
        self._closing = False
        self._wake, self._finished = threading.Event(), threading.Event()
        self._headline: str | None = None
        self._alarm: Alarm | None = None
        self._patience_s: float | None = None
        threading.Thread(target=self._run, name="hang-watch", daemon=True).start()

    def fail(self, failure: Failure) -> str | None:
        """Report an exception of the main thread, which calls this, and find out whether another rank failed first.

        Returns:
            In bounded time, the headline of the verdict on the other rank; None if this rank failed first, or there is
            no verdict.
        """
        self._progress.note(self._progress.phase)
        self._failure = failure
        self._wake.set()
        self._finished.wait(_FAIL_SECONDS)
        self._progress.touch()
        failed_first = self._alarm is not None and self._alarm.ranks == (self._rank,)
        return None if failed_first else self._headline

    def close(self) -> None:
        """Leave the run in order: the thread sends a last heartbeat and ends."""
        self._closing = True
        self._wake.set()
        self._finished.wait(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            try:
                self._peers.probe()
                self._headline = self._watch_until_verdict()
            except Exception as error:  # a fault of the watch must not end the run
                self._give_up(error)
            finally:
                self._finished.set()
                self._store.close()
            if self._headline is not None:
                self._end_if_stuck()
        finally:
            self._inside = None  # the frame keeps the model alive

    def _give_up(self, error: Exception) -> None:
        say(f"Rank {self._rank}: nobody watches for hangs any more: {type(error).__name__}: {error}")
        # Without this, the other ranks would take the silence for a dead process.
        with contextlib.suppress(Exception):
            last_heartbeat = Heartbeat(self._heartbeats, time.time(), True, self._progress.phase, 0, 0.0, 0.0, {})
            self._store.set(f"beat/{self._rank}", last_heartbeat.to_json())

    def _watch_until_verdict(self) -> str | None:
        """Return the headline of a final verdict; None when this rank has left in order, or the store has ended."""
        while True:
            try:
                return self._handle_alarms()
            except StoreLostError as lost:
                if (alarm := self._judge_lost_store(lost)) is not None:
                    return self._alarm_handler.report_alone(alarm, self._heartbeat(), self._failure is not None)
                if self._store_may_end() or self._rank == 0:
                    return None

    def _handle_alarms(self) -> str | None:
        """Return the headline of a final verdict; None when this rank has left in order."""
        while (alarm := self._send_heartbeats()) is not None:
            self._alarm = alarm
            self._patience_s = None if alarm.kind in PASSING else min(_STUCK_SECONDS, self._dead_after_s)
            outcome = self._alarm_handler.hold(alarm, self._heartbeat(), self._failure is not None)
            if outcome.final:
                return outcome.headline
            self._go_on(alarm, outcome)
        self._alarm = None
        return None

    def _go_on(self, alarm: Alarm, outcome: Outcome) -> None:
        self._alarm = None
        self._reported_at = time.monotonic()
        self._silent |= set(alarm.ranks)
        self._stall_reported = self._stall_reported or alarm.kind == "stalled"
        self._judged = outcome.judge == self._rank
        self._peers.restart(self._silent)

    def _report_passed_hang(self) -> None:
        """Report that a hang has passed, once this rank makes progress and the silent ranks send heartbeats again."""
        if self._reported_at is None:
            return
        seconds = time.monotonic() - self._reported_at
        still = self._silent.intersection(self._peers.silent(self._reported_at)) and not self._closing
        if still or self._progress.idle_s >= seconds:
            return
        if self._judged:
            self._alarm_handler.resolve(seconds)
        self._reported_at, self._silent, self._stall_reported = None, set(), False

    def _send_heartbeats(self) -> Alarm | None:
        """Send heartbeats until there is an alarm, which is returned, or until this rank leaves."""
        while not self._closing and not self._has_left():
            self._store.set(f"beat/{self._rank}", self._heartbeat().to_json())
            self._lost_at = None
            if (raised := self._alarm_handler.alarm()) is not None:
                return raised
            if (alarm := self._find_alarm()) is not None:
                return self._alarm_handler.open(alarm)
            self._report_passed_hang()
            accept_probes(self._peers.members[self._rank])
            self._wake.wait(self._beat_s)
            self._wake.clear()
        self._report_passed_hang()
        self._store.set(f"beat/{self._rank}", self._heartbeat(over=True).to_json())
        if self._rank == 0:  # the store ends with this process, and the others could take rank 0 for killed
            deadline = time.monotonic() + _CLOSE_SECONDS - 1
            self._peers.listen()
            while not self._peers.all_over() and time.monotonic() < deadline:
                time.sleep(_LAST_READ_PAUSE_SECONDS)
                self._peers.listen()
        return None

    def _has_left(self) -> bool:
        """Whether the main thread has left the Trainer's call, even if no hook was called."""
        return self._inside is not None and not is_inside(self._main_thread, self._inside)

    def _heartbeat(self, over: bool = False) -> Heartbeat:
        step, entered = self._count_progress()
        self._heartbeats += 1
        now = self._progress
        return Heartbeat(self._heartbeats, time.time(), over, now.phase, step, now.idle_s, now.limit_s, entered)

    def _count_progress(self) -> tuple[int, dict[str, int]]:
        """Return the steps and collectives so far. New ones count as progress, for times when no hook is called."""
        done = (self._step(), flight_recorder.counts())
        if done != self._done:
            self._done = done
            self._progress.touch()
        return done

    def _find_alarm(self) -> Alarm | None:
        """Return what is wrong, as far as this rank can see."""
        if self._failure is not None:
            return self._find_cause(self._failure)
        if self._progress.phase in (STOP_BARRIER, END):
            return None
        if gone := self._peers.gone():
            return Alarm("gone", gone, "")
        idle_s = self._progress.idle_s
        hears_all = self._rank == 0 or idle_s > self._progress.limit_s + self._dead_after_s
        self._peers.listen(None if hears_all else [0])
        silent = self._peers.dead(self._dead_after_s)
        if silent and idle_s > self._dead_after_s and (alarm := self._check_silent(silent, idle_s)) is not None:
            return alarm
        stalls = hears_all and idle_s > self._progress.limit_s and self._peers.all_idle()
        return Alarm("stalled", (), f"for {idle_s:.0f} s") if stalls and not self._stall_reported else None

    def _check_silent(self, silent: tuple[int, ...], idle_s: float) -> Alarm | None:
        """Check the liveness of silent ranks, at intervals, and return an alarm if there is something new."""
        new = tuple(rank for rank in silent if rank not in self._silent)
        if not new and time.monotonic() < self._asked_at + self._dead_after_s / _ASKED_TIMES:
            return None
        liveness_of = self._peers.liveness_of(silent)
        self._asked_at = time.monotonic()
        if gone := tuple(rank for rank in silent if liveness_of[rank] == "gone"):
            return Alarm("gone", gone, "")
        after_s = _VANISHED_TIMES * self._dead_after_s
        lost = self._peers.vanished(liveness_of, after_s, self._dead_after_s) if idle_s > after_s else ()
        if lost:
            text = (
                f"for {after_s:.0f} s none of its processes was heard of, its machine does not answer, and all others "
                "wait"
            )
            return Alarm("vanished", lost, text)
        why = {rank: why_silent(self._peers.members[rank], liveness_of[rank]) for rank in new}
        text = "; ".join(why.values() if len(new) == 1 else (f"rank {rank}: {each}" for rank, each in why.items()))
        return Alarm("silent", new, f"for {self._dead_after_s:.0f} s: {text}") if new else None

    def _find_cause(self, failure: Failure) -> Alarm:
        """Find the rank that caused an exception: if it only reports a closed connection, the rank at the other end."""
        if not failure.of_others:
            return Alarm("ended", (self._rank,), failure.text)
        self._peers.listen()
        began = time.monotonic()
        while time.monotonic() < began + _HEARTBEATS_MISSING * self._beat_s:
            if (raised := self._alarm_handler.alarm()) is not None and raised.kind not in PASSING:
                return raised
            if gone := self._peers.gone():
                return Alarm("gone", gone, "")
            time.sleep(self._beat_s / 10)
            self._store.set(f"beat/{self._rank}", self._heartbeat().to_json())
            self._peers.listen()
        silent = self._peers.silent(began)
        liveness_of = self._peers.liveness_of(silent)
        return Alarm("lost", tuple(rank for rank in silent if liveness_of[rank] != "alive"), failure.text)

    def _store_may_end(self) -> bool:
        """Whether this rank is leaving or at a stop barrier, or rank 0, which serves the store, was leaving."""
        leaves = self._closing or self._has_left() or self._progress.phase in (STOP_BARRIER, END)
        if leaves or self._rank == 0:
            return leaves
        server = self._peers.last(0)
        return server.over or server.phase == END

    def _judge_lost_store(self, lost: StoreLostError) -> Alarm | None:
        """Return an alarm if the loss of the store, served by rank 0 or its node, ends the run; None if it may pass."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        if self._store_may_end():
            return None
        if self._rank == 0 or (self._alarm is not None and self._alarm.kind not in PASSING):
            return self._alarm
        liveness = self._peers.liveness_of([0])[0]
        if liveness == "gone":
            self._patience_s = min(_STUCK_SECONDS, self._dead_after_s)
            return Alarm("gone", (0,), "")
        if not lost.silent and liveness != "unreachable":
            return Alarm("unserved", (0,), store_server())
        return self._judge_silent_store(liveness, time.monotonic() - self._lost_at)

    def _judge_silent_store(self, liveness: Liveness, lost_s: float) -> Alarm | None:
        """Return an alarm if a store that does not answer ends the run; otherwise report it once, wait, return None."""
        why = why_silent(self._peers.members[0], liveness)
        silent = Alarm("silent", (0,), f"for {self._dead_after_s:.0f} s: {why}")
        if self._kill or self._failure is not None:
            return silent
        waited_s = min(lost_s + self._dead_after_s, self._progress.idle_s)
        if liveness == "unreachable" and waited_s > _VANISHED_TIMES * self._dead_after_s:
            return Alarm("vanished", (0,), f"neither it nor its machine has answered for {waited_s:.0f} s")
        if 0 not in self._silent and self._progress.idle_s > self._dead_after_s:
            self._alarm_handler.report_alone(silent, self._heartbeat(), failed=False)
            self._go_on(silent, Outcome("", False, self._rank))
        self._wake.wait(self._beat_s)
        self._wake.clear()
        return None

    def _end_if_stuck(self) -> None:
        """End the process if its main thread does not end by itself: it may wait for a rank that never comes."""
        while not self._closing and self._inside is not None and not self._has_left():
            self._count_progress()
            idle_s = self._progress.idle_s
            if idle_s > self._most_idle_s():
                self._end(idle_s)
            time.sleep(self._beat_s / 10)

    def _most_idle_s(self) -> float:
        """Return how many seconds the main thread may be idle after a verdict."""
        now = self._progress
        if now.phase in (STOP_BARRIER, END):
            return float("inf")
        if self._failure is not None:
            # A slow exit may be an upload. Only a wait for the other ranks is useless: they know of the failure.
            if not self._kill and not communicates(frames_of(self._main_thread)):
                return float("inf")
            return max(_LEAVE_SECONDS, now.limit_s if now.phase == CHECKPOINT else 0.0)
        # If only the store is gone, the other ranks may live: wait for as long as a stall takes.
        return now.limit_s if self._patience_s is None else self._patience_s
