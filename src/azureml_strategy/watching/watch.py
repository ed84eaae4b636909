"""A thread of each rank that tells the others that it lives, and looks whether they do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType

from torch.distributed import Store  # type: ignore[attr-defined]

from azureml_strategy.network.machine import Member
from azureml_strategy.watching import recorder
from azureml_strategy.watching.bounded import BoundedStore, StoreLostError, within
from azureml_strategy.watching.hearing import Hearing
from azureml_strategy.watching.inquiry import Inquiry, store_server
from azureml_strategy.watching.progress import CHECKPOINT, END, STANDSTILL, Progress
from azureml_strategy.watching.records import Records, say
from azureml_strategy.watching.report import Alarm, Beat
from azureml_strategy.watching.stack import is_inside, trainer_frame

# So many signs of life may be missing before a rank counts as gone, when a connection to it has been closed.
_BEATS_MISSING = 3
# A main thread may take so long to meet the end of another rank by itself: gloo tells it at once, NCCL never.
_LINGER_SECONDS = 30.0
# With an exception it may still have a checkpoint to write, for which a writer waits a minute at the most.
_LEAVE_SECONDS = 120.0
_FAIL_SECONDS = 60.0
# A process that ends before its last word is heard would be taken for one that has died.
_CLOSE_SECONDS = 10.0
_FAREWELL_PAUSE_SECONDS = 0.2
# For a further connection, where one has ended.
_CONNECT_SECONDS = 12.0


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

    Rank 0 hears all ranks; the others hear rank 0, and each sees the processes of its own machine. Whoever finds
    something writes an alarm into the store; everybody answers it with a report (`Inquiry`), and ends.

    Args:
        store: shared by the ranks, with nothing else under its names; for this thread only.
        connect: opens another connection to the same names, where the store's has ended; None if it cannot.
        rank: this process's.
        members: all ranks' processes, this one included.
        progress: the main thread's notes.
        step: tells its optimizer steps.
        main_thread: its `threading.get_ident`, inside of the Trainer's call.
        dead_after_s: after how long a silent rank counts as gone, if this one has nothing to do either, in seconds.
        beat_s: pause between two signs of life, in seconds.
        records: keeps the verdict and this rank's flight recorder.
        end: ends the process, whose main thread cannot, and has done nothing for so many seconds.
    """

    def __init__(
        self,
        store: BoundedStore,
        connect: Callable[[], Store | None],
        rank: int,
        members: Mapping[int, Member],
        progress: Progress,
        step: Callable[[], int],
        main_thread: int,
        dead_after_s: float,
        beat_s: float,
        records: Records,
        end: Callable[[float], None],
    ) -> None:
        self._store = store
        self._connect = connect
        self._rank = rank
        self._progress = progress
        self._step = step
        self._main_thread = main_thread
        # The call itself: a script may catch its exception, and call again.
        self._inside: FrameType | None = trainer_frame(main_thread)
        self._dead_after_s = dead_after_s
        self._beat_s = beat_s
        self._end = end
        self._hearing = Hearing(store, rank, members, progress.limit_s)
        self._inquiry = Inquiry(store, self._hearing, rank, len(members), main_thread, records)
        self._beats = 0
        self._done: tuple[int, dict[str, int]] | None = None
        self._failure: Failure | None = None
        self._closing = False
        self._wake = threading.Event()
        self._finished = threading.Event()
        self._headline: str | None = None
        self._alarm: Alarm | None = None
        self._patience_s: float | None = None
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
        self._progress.touch()
        return None if self._own_fault else self._headline

    def close(self) -> None:
        """This rank leaves the run in order."""
        self._closing = True
        self._wake.set()
        self._finished.wait(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._conclude()
            if self._headline is not None:
                self._linger()
        finally:
            self._inside = None  # it holds the model

    def _conclude(self) -> None:
        """Come to a verdict, if there is one to come to."""
        try:
            self._headline = self._follow()
        except Exception as error:  # a fault of the watch is none of the run's
            self._give_up(error)
        finally:
            self._finished.set()
            self._store.close()

    def _give_up(self, error: Exception) -> None:
        say(f"Rank {self._rank}: nobody watches for hangs any more: {type(error).__name__}: {error}")
        # Its silence must not pass for that of a rank that has died.
        with contextlib.suppress(Exception):
            last_word = Beat(self._beats, time.time(), True, self._progress.phase, 0, 0.0, 0.0, {})
            self._store.set(f"beat/{self._rank}", last_word.to_json())

    def _follow(self) -> str | None:
        while True:
            try:
                return self._learn()
            except StoreLostError as lost:
                if not self._renewed():
                    return self._without_store(lost)

    def _learn(self) -> str | None:
        """The headline of a verdict; None when this rank has left in order."""
        alarm = self._alarm = self._look_out()
        if alarm is None:
            return None
        self._own_fault = alarm.ranks == (self._rank,)
        self._patience_s = 0.0 if alarm.kind == "stalled" else min(_LINGER_SECONDS, self._dead_after_s)
        return self._inquiry.hold(alarm, self._beat(), self._failure is not None)

    def _look_out(self) -> Alarm | None:
        """Until there is an alarm, or this rank leaves."""
        while not self._closing and not self._has_left():
            self._store.set(f"beat/{self._rank}", self._beat().to_json())
            said = self._store.get("alarm")
            alarm = Alarm.from_json(said) if said else self._find()
            if alarm is not None:
                return Alarm.from_json(self._store.set_first("alarm", alarm.to_json()))
            self._wake.wait(self._beat_s)
            self._wake.clear()
        self._store.set(f"beat/{self._rank}", self._beat(over=True).to_json())
        if self._rank == 0:
            self._see_off()
        return None

    def _has_left(self) -> bool:
        """Whether the main thread is out of the Trainer's call, though nobody has said so."""
        return self._inside is not None and not is_inside(self._main_thread, self._inside)

    def _see_off(self) -> None:
        """Stay while others have not left: the store goes with this process, which they may take for killed."""
        deadline = time.monotonic() + _CLOSE_SECONDS - 1
        self._hearing.listen()
        while not self._hearing.all_over() and time.monotonic() < deadline:
            time.sleep(_FAREWELL_PAUSE_SECONDS)
            self._hearing.listen()

    def _beat(self, over: bool = False) -> Beat:
        step, entered = self._notice()
        self._beats += 1
        now = self._progress
        return Beat(self._beats, time.time(), over, now.phase, step, now.idle_s, now.limit_s, entered)

    def _notice(self) -> tuple[int, dict[str, int]]:
        """Steps and collectives until now: they are progress as well, where no hook is called."""
        done = (self._step(), recorder.counts())
        if done != self._done:
            self._done = done
            self._progress.touch()
        return done

    def _find(self) -> Alarm | None:
        """What is wrong, as far as this rank can see."""
        if self._failure is not None:
            return self._cause(self._failure)
        if self._progress.phase in (STANDSTILL, END):
            return None
        if gone := self._hearing.gone():
            return Alarm("gone", gone, "")
        idle_s = self._progress.idle_s
        hears_all = self._rank == 0 or idle_s > self._progress.limit_s + self._dead_after_s
        self._hearing.listen(None if hears_all else [0])
        silent = self._hearing.dead(self._dead_after_s)
        if silent and idle_s > self._dead_after_s:
            return Alarm("silent", silent, f"for {self._dead_after_s:.0f} s")
        if hears_all and idle_s > self._progress.limit_s and self._hearing.all_idle():
            return Alarm("stalled", (), f"for {idle_s:.0f} s")
        return None

    def _cause(self, failure: Failure) -> Alarm:
        """Of an exception that only says that a connection has ended, the rank at its other end."""
        if not failure.of_others:
            return Alarm("ended", (self._rank,), failure.text)
        self._hearing.listen()
        began = time.monotonic()
        while time.monotonic() < began + _BEATS_MISSING * self._beat_s:
            said = self._store.get("alarm")
            if said:
                return Alarm.from_json(said)
            if gone := self._hearing.gone():
                return Alarm("gone", gone, "")
            time.sleep(self._beat_s / 10)
            self._store.set(f"beat/{self._rank}", self._beat().to_json())
            self._hearing.listen()
        return Alarm("lost", self._hearing.silent(began), failure.text)

    def _renewed(self) -> bool:
        """Whether the store answers on another connection: one alone may end for reasons of the network's."""
        if self._first_has_left() or self._hearing.has_ended(0):
            return False
        time.sleep(self._beat_s / 10)
        connection = within(_CONNECT_SECONDS, self._connect)
        if connection is not None:
            self._store.renew(connection)
        return connection is not None

    def _first_has_left(self) -> bool:
        """Whether rank 0 was about to leave in order when it was heard of last."""
        if self._rank == 0:
            return False
        beat = self._hearing.last(0)
        return beat.over or beat.phase == END

    def _without_store(self, lost: StoreLostError) -> str | None:
        """Rank 0 or its node serves the store: it has ended, and the run with it."""
        if self._closing or self._progress.phase in (STANDSTILL, END) or self._first_has_left():
            return None
        if self._alarm is not None and self._alarm.kind == "stalled":
            return f"The ranks hang {self._alarm.text}; rank 0 has ended before it said why."
        if self._alarm is None and self._rank == 0:
            return None  # too little is known
        alarm = self._alarm or self._alarm_of_first(lost)
        return self._inquiry.speak_alone(alarm, self._beat(), self._failure is not None)

    def _alarm_of_first(self, lost: StoreLostError) -> Alarm:
        if self._hearing.has_ended(0):
            self._patience_s = min(_LINGER_SECONDS, self._dead_after_s)
            return Alarm("gone", (0,), "")
        if lost.silent:
            return Alarm("silent", (0,), f"for {self._dead_after_s:.0f} s")
        return Alarm("unserved", (0,), store_server())

    def _linger(self) -> None:
        """End the process if its main thread cannot: it may wait for a rank that never comes."""
        while not self._closing and self._inside is not None and not self._has_left():
            self._notice()
            idle_s = self._progress.idle_s
            if idle_s > self._most_idle_s():
                self._end(idle_s)
            time.sleep(self._beat_s / 10)

    def _most_idle_s(self) -> float:
        """How long the main thread may do nothing once there is a verdict, in seconds."""
        now = self._progress
        if now.phase in (STANDSTILL, END):
            return float("inf")
        if self._failure is not None:  # a checkpoint may be written on the way out
            return max(_LEAVE_SECONDS, now.limit_s if now.phase == CHECKPOINT else 0.0)
        # Where only the store is gone, the others may live: then it takes no less than a stall.
        return now.limit_s if self._patience_s is None else self._patience_s
