"""A thread of each rank that tells the others that it lives, and looks whether they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from azureml_strategy.watching import recorder
from azureml_strategy.watching.bounded import BoundedStore, StoreLostError
from azureml_strategy.watching.hearing import Hearing
from azureml_strategy.watching.inquiry import Inquiry
from azureml_strategy.watching.machine import Member
from azureml_strategy.watching.progress import END, STANDSTILL, Progress
from azureml_strategy.watching.records import Records
from azureml_strategy.watching.report import Alarm, Beat
from azureml_strategy.watching.stack import inside_trainer

# So many signs of life may be missing before a rank counts as gone, when a connection to it has been closed.
_BEATS_MISSING = 3
# A main thread may take so long to meet the end of another rank by itself: gloo tells it at once, NCCL never.
_LINGER_SECONDS = 30.0
# With an exception it may still have a checkpoint to write, for which a writer waits a minute at the most.
_LEAVE_SECONDS = 120.0
_FAIL_SECONDS = 60.0
# A process that ends before its last word is heard would be taken for one that has died.
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Failure:
    """An exception on this rank's main thread.

    Attributes:
        text: what it says.
        of_others: whether it says only that a connection has ended, so that the cause is another rank's.
    """

    text: str
    of_others: bool


class Watch:
    """Says every other second that this rank lives, and raises an alarm when another does not, or no one does anything.

    Rank 0 hears all ranks; the others hear rank 0, and each the processes of its own machine. Whoever finds something
    writes an alarm into the store; everybody answers it with a report (`Inquiry`), and ends.

    Args:
        store: shared by the ranks, with nothing else under its names; for this thread only.
        member: this process.
        world_size: number of ranks.
        progress: the main thread's notes.
        step: tells its optimizer steps.
        main_thread: its `threading.get_ident`.
        dead_after_s: after how long a silent rank counts as gone, if this one has nothing to do either, in seconds.
        beat_s: pause between two signs of life, in seconds.
        records: keeps the verdict and this rank's flight recorder.
        end: ends the process; called when its main thread cannot do it.
    """

    def __init__(
        self,
        store: BoundedStore,
        member: Member,
        world_size: int,
        progress: Progress,
        step: Callable[[], int],
        main_thread: int,
        dead_after_s: float,
        beat_s: float,
        records: Records,
        end: Callable[[str], None],
    ) -> None:
        self._store = store
        self._member = member
        self._progress = progress
        self._step = step
        self._main_thread = main_thread
        self._dead_after_s = dead_after_s
        self._beat_s = beat_s
        self._end = end
        self._hearing = Hearing(store, member, world_size)
        self._inquiry = Inquiry(store, self._hearing, member.rank, world_size, main_thread, records)
        self._beats = 0
        self._failure: Failure | None = None
        self._closing = False
        self._wake = threading.Event()
        self._finished = threading.Event()
        self._headline: str | None = None
        self._own_fault = False
        threading.Thread(target=self._run, name="hang-watch", daemon=True).start()

    def fail(self, failure: Failure) -> str | None:
        """Tell the others, and learn whether another rank was the first; for the main thread, in bounded time.

        Args:
            failure: what has happened.

        Returns:
            What is known of the other rank; None if this one was the first.
        """
        self._progress.note(self._progress.phase)
        self._failure = failure
        self._wake.set()
        self._finished.wait(_FAIL_SECONDS)
        return None if self._own_fault else self._headline

    def close(self) -> None:
        """This rank leaves the run in order."""
        self._closing = True
        self._wake.set()
        self._finished.wait(_CLOSE_SECONDS)

    def _run(self) -> None:
        patience_s = _LINGER_SECONDS
        try:
            self._hearing.introduce()
            alarm = self._look_out()
            if alarm is not None:
                self._own_fault = alarm.ranks == (self._member.rank,)
                patience_s = 0.0 if alarm.kind == "stalled" else _LINGER_SECONDS
                self._headline = self._inquiry.hold(alarm, self._beat(), self._failure is not None)
        except StoreLostError as lost:
            self._headline = self._without_store(lost)
        finally:
            self._finished.set()
            self._store.close()
        if self._headline is not None:
            self._linger(self._headline, patience_s)

    def _look_out(self) -> Alarm | None:
        """Until there is an alarm, or this rank leaves."""
        while not self._closing:
            self._store.set(f"beat/{self._member.rank}", self._beat().to_json())
            said = self._store.get("alarm")
            alarm = Alarm.from_json(said) if said else self._find()
            if alarm is not None:
                return Alarm.from_json(self._store.set_first("alarm", alarm.to_json()))
            self._wake.wait(self._beat_s)
            self._wake.clear()
        self._store.set(f"beat/{self._member.rank}", self._beat(over=True).to_json())
        return None

    def _beat(self, over: bool = False) -> Beat:
        self._beats += 1
        now = self._progress
        entered = recorder.counts()
        return Beat(self._beats, time.time(), over, now.phase, self._step(), now.idle_s, now.limit_s, entered)

    def _find(self) -> Alarm | None:
        """What is wrong, as far as this rank can see."""
        if self._failure is not None:
            return self._cause(self._failure)
        if self._progress.phase in (STANDSTILL, END):
            return None
        self._hearing.meet_all()
        if gone := self._hearing.gone():
            return Alarm("gone", gone, "")
        idle_s = self._progress.idle_s
        hears_all = self._member.rank == 0 or idle_s > self._progress.limit_s + self._dead_after_s
        self._hearing.listen(None if hears_all else [0])
        silent = self._hearing.silent(time.monotonic() - self._dead_after_s)
        if silent and idle_s > self._dead_after_s:
            return Alarm("silent", silent, f"for {self._dead_after_s:.0f} s")
        if hears_all and idle_s > self._progress.limit_s and self._hearing.all_idle():
            return Alarm("stalled", (), f"for {idle_s:.0f} s")
        return None

    def _cause(self, failure: Failure) -> Alarm:
        """Of an exception that only says that a connection has ended, the rank at its other end."""
        if not failure.of_others:
            return Alarm("ended", (self._member.rank,), failure.text)
        self._hearing.listen()
        began = time.monotonic()
        while time.monotonic() < began + _BEATS_MISSING * self._beat_s:
            said = self._store.get("alarm")
            if said:
                return Alarm.from_json(said)
            self._hearing.meet_all()
            if gone := self._hearing.gone():
                return Alarm("gone", gone, "")
            time.sleep(self._beat_s / 10)
            self._store.set(f"beat/{self._member.rank}", self._beat().to_json())
            self._hearing.listen()
        return Alarm("lost", self._hearing.silent(began), failure.text)

    def _without_store(self, lost: StoreLostError) -> str | None:
        """Rank 0 serves the store: it has ended, and the run with it."""
        if self._closing or self._progress.phase in (STANDSTILL, END):
            return None
        text = f"for {self._dead_after_s:.0f} s"
        alarm = Alarm("silent" if lost.silent else "gone", (0,), text)
        return self._inquiry.speak_alone(alarm, self._beat(), self._failure is not None)

    def _linger(self, headline: str, patience_s: float) -> None:
        """End the process if its main thread cannot: it may wait for a rank that never comes."""
        while inside_trainer(self._main_thread) and not self._closing:
            most_s = patience_s if self._failure is None else _LEAVE_SECONDS
            if self._progress.idle_s > min(most_s, self._dead_after_s):
                self._end(headline)
            time.sleep(self._beat_s / 10)
