"""The background thread that writes to MLflow, so that training does not wait for it, and its flush on SIGTERM outside
of `fit`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import threading
import time
import warnings
from collections import Counter, deque
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.tracking.batch import Batch, Record, make_batches
from azureml_strategy.tracking.offline_queue import LeftoverQueues, OfflineQueue, command
from azureml_strategy.tracking.run import LoggedMetrics, OpenRun, RunRequest, describe_store, is_remote
from azureml_strategy.tracking.sender import SECOND_LOOK_S, Sender
from azureml_strategy.tracking.store import StoreAwayError, StoreRefusedError, TrackingError, store_errors

if TYPE_CHECKING:
    from mlflow.entities import Metric

# Seconds between two attempts while the store is away. The first pause doubles each time, up to the longest. A store
# that has taken something since the last attempt is tried again soon.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SOON_S = 1.0, 30.0, 0.1
# How long the end of a run waits for a store that is known to be away. Everything is already in the file then.
_PATIENCE_S = 10.0
# The names of the kinds of items in the warning that counts what is left at the end of a run.
_PLURALS = {
    "metrics": "points of metrics",
    "params": "parameters",
    "tags": "tags",
    "files": "files",
    "artifacts": "files",
}

# Azure ML gives a preempted node about 30 seconds. Most of them are left to everything else.
_FLUSH_S = 10.0


class BatchWriter:
    """Opens one run and writes records to it, in batches, on a thread of its own.

    Training waits for the store only if the store takes everything but is too slow: then a full queue blocks `put`.

    Args:
        request: the run; the thread opens it as soon as the store answers.
        folder: for the file of what the store has not taken; earlier starts may have left such files there.
        interval_s: seconds for which records are collected before they are written.
        capacity: maximum number of records in memory; a record is one call of `log_metrics`.
        second_look_s: see `Sender`.

    Attributes:
        run: None until it is open.
        refusal: the error, if the store says that the run cannot be opened.
    """

    def __init__(
        self,
        request: RunRequest,
        folder: Path,
        interval_s: float = 1.0,
        capacity: int = 20_000,
        second_look_s: float = SECOND_LOOK_S,
    ) -> None:
        self.run: OpenRun | None = None
        self.refusal: TrackingError | None = None
        self._request = request
        self._folder = folder
        self._interval_s = interval_s
        self._capacity = capacity
        self._second_look_s = second_look_s
        self._records: deque[Record] = deque(maxlen=capacity)
        self._backlog: deque[Batch] = deque()
        self._offline: OfflineQueue | None = None
        self._sent_up_to = 0  # of the offline queue, in bytes
        self._leftovers = LeftoverQueues(folder, request)
        self._sender: Sender | None = None
        self._continues = False
        # Unlike an Event, a SimpleQueue allows a signal handler to `put` while it interrupts another `put`.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._tried = threading.Event()
        self._is_watched = True
        self._closes_at_exit = False
        self._closing = False
        self._busy = False
        self._recovering = False
        self._away: StoreAwayError | None = None
        self._pause_s = 0.0
        self._progress_at_fault = 0
        self._resume_at = 0.0
        self._lost = 0
        self._disk_error = ""
        self._moving = threading.RLock()  # held while records move between queues and are in none of them

    def start(self) -> None:
        """Start the thread, which opens the run."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mlflow-writer", daemon=True)
        self._thread.start()
        self._close_at_exit()

    def wait_for_run(self, timeout_s: float | None) -> None:
        """Wait until the run is open, or the first attempt to open it has failed; None waits without limit.

        Raises:
            TrackingError: the store says that there is no such run, or is a file or database that cannot be opened.
        """
        self._is_watched = self._tried.wait(timeout_s)
        refusal, uri = self.refusal, self._request.tracking_uri
        if refusal is None and self._away is not None and not is_remote(uri):
            refusal = TrackingError(f"The store {describe_store(uri)} cannot be opened: {self._away}")
        if refusal is not None:
            self._stop()
            raise refusal

    def skip_logged_before(self) -> None:
        """Do not write metrics again that previous attempts have written."""
        self._continues = True
        if self._sender is not None and self.run is not None:
            self._sender.logged_before = LoggedMetrics(self.run.client, self.run.run_id)

    def put(self, record: Record) -> None:
        """Queue a record. This returns at once unless the store cannot keep up."""
        if self._thread is None:
            self.start()
        elif not self._closes_at_exit:
            self._close_at_exit()
        while len(self._records) >= self._capacity and not self._disk_error:
            if self._away is not None or self._recovering:
                self._keep()
            else:
                time.sleep(0.01)
        self._lost += len(self._records) >= self._capacity
        self._records.append(record)

    def pending_metrics(self) -> list[Metric]:
        """The pending metrics, in order, with those that the store is taking at this moment."""
        with self._moving:
            offline = self._existing_queue()
            queued = [batch for batch, _ in offline.batches(self._sent_up_to)] if offline else []
            suspects = [each.item for each in self._sender.suspects if each.kind == "metrics"] if self._sender else []
            batches = [Batch("metrics", suspects), *queued, *self._backlog, *make_batches(self._records)]
            return [item for batch in batches if batch.kind == "metrics" for item in batch.items]

    @property
    def is_away(self) -> bool:
        """Whether the last attempt to reach the store failed."""
        return self._away is not None

    def wake(self) -> None:
        """Write what is queued now, not at the end of the interval. Safe in a signal handler."""
        self._wake.put(None)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything queued so far is written.

        It polls and does not wait on a lock, because a signal handler may call it while it runs. It gives up, and
        returns False, if the store took nothing for `timeout_s`, or for ten seconds if the store is known to be away.
        """
        self.wake()
        progress, since = self._progress(), time.monotonic()
        asked = since
        while self._is_anything_left():
            if self._progress() != progress:
                progress, since = self._progress(), time.monotonic()
            if time.monotonic() - since > (min(timeout_s, _PATIENCE_S) if self._away else timeout_s):
                return False
            if self._away and time.monotonic() > asked + _FIRST_PAUSE_S:  # do not wait out a longer pause
                asked = time.monotonic()
                self.wake()
            time.sleep(0.002)
        return True

    def close(self, timeout_s: float = 60.0) -> bool:
        """Flush and end the thread; a later `put` starts it again.

        What could not be written goes to the file, and a warning names it. In that case this returns False, and the
        thread keeps trying until the process ends.
        """
        atexit.unregister(self.close)
        self._closes_at_exit = False
        if self._thread is None:
            return True
        complete = self.flush(timeout_s)
        if complete:
            self._stop()
        else:
            self._keep()
            self._warn_of_rest()
        if self._lost:
            warnings.warn(f"{self._lost} log calls were dropped: MLflow was away, and so was the disk.", stacklevel=2)
        return complete and not self._lost

    def _close_at_exit(self) -> None:
        self._closes_at_exit = True
        atexit.register(self.close)

    def _progress(self) -> int:
        return self._sender.answers if self._sender is not None else 0

    def _is_anything_left(self) -> bool:
        # The order matters: the thread sets `_busy` before it takes a record out of the queue.
        return bool(
            self._records
            or self._busy
            or self._backlog
            or self._offline
            or (self._sender.suspects if self._sender else self._away is None)
            or self._leftovers
        )

    def _stop(self) -> None:
        self._closing = True
        self.wake()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        atexit.unregister(self.close)

    def _run(self) -> None:
        self._drain()
        while not self._closing:
            woken = False
            timeouts_s = [self._interval_s]
            if self._away is not None:
                timeouts_s.append(max(self._resume_at - time.monotonic(), 0.01))
            if self._sender is not None and self._sender.suspects:
                timeouts_s.append(self._second_look_s)
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=min(timeouts_s))
                woken = True
            if self._closing:
                return
            if woken or time.monotonic() >= self._resume_at:
                self._drain()
                continue
            self._busy = True
            self._keep()
            self._busy = False

    def _drain(self) -> None:
        self._busy = True
        try:
            self._send_all()
            self._away, self._pause_s = None, 0.0
        except (StoreAwayError, StoreRefusedError) as error:
            self._fail(error)
        except TrackingError as error:
            self.refusal = error if self._is_watched and not self._tried.is_set() else None
            self._fail(error)
        except Exception as error:  # this thread must survive any error
            self._fail(StoreAwayError(redact_text(f"{type(error).__name__}: {error}")))
        finally:
            self._tried.set()
            self._busy = False

    def _send_all(self) -> None:
        sender = self._sender or self._open()
        self._recovering = self._offline is not None or bool(self._leftovers)
        self._leftovers.send()
        while (offline := self._existing_queue()) is not None:
            for batch, end in offline.batches(self._sent_up_to):
                sender.send(batch)
                self._sent_up_to = end
            with self._moving:
                if self._sent_up_to >= offline.size:
                    offline.remove()
                    self._offline, self._sent_up_to = None, 0
        self._recovering = False
        while self._backlog or self._records:
            self._send_next(sender)
        sender.look_again()

    def _open(self) -> Sender:
        with store_errors():
            run = self._request.open(again=self._tried.is_set())
        if self._offline is not None:
            self._offline.opened(run.run_id)
        self.run, self._sender = run, Sender(run, self._second_look_s)
        if self._continues:
            self.skip_logged_before()
        self._tried.set()
        return self._sender

    def _send_next(self, sender: Sender) -> None:
        with self._moving:
            if not self._backlog:
                records = [self._records.popleft() for _ in range(min(len(self._records), 1000))]
                self._backlog.extend(make_batches(records))
            batch = self._backlog[0] if self._backlog else None
        if batch is None:  # none of these records had a value that could be read
            return
        sender.send(batch)
        with self._moving:
            if self._backlog and self._backlog[0] is batch:  # else `_keep` on another thread has moved it to the file
                self._backlog.popleft()

    def _fail(self, error: StoreAwayError | StoreRefusedError | TrackingError) -> None:
        first = self._away is None
        self._away = error if isinstance(error, StoreAwayError) else StoreAwayError(str(error))
        before, self._progress_at_fault = self._progress_at_fault, self._progress()
        doubled = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._pause_s = doubled if self._progress_at_fault == before else _SOON_S
        self._resume_at = time.monotonic() + max(self._pause_s, self._away.pause_s)
        self._keep()
        # The first attempt to open a file or database: `wait_for_run` raises this error.
        is_raised = not self._tried.is_set() and not is_remote(self._request.tracking_uri)
        if first and self.refusal is None and not is_raised:
            where = f"kept in {self._offline.path if self._offline else 'memory'}"
            warnings.warn(
                f"MLflow is away; what is logged is {where} and tried again, training goes on: {error}", stacklevel=2
            )

    def _keep(self) -> None:
        """Move all records and batches in memory to the file."""
        with self._moving:
            held = [*self._backlog, *(self._sender.take_suspects() if self._sender else ())]
            held += make_batches(self._records.popleft() for _ in range(len(self._records)))
            if not held:
                return
            try:
                offline = self._existing_queue()
                if offline is None:
                    offline = OfflineQueue.create(self._folder, self._request)
                    if self.run is not None:
                        offline.opened(self.run.run_id)
                self._offline = offline
                offline.append(held)
                self._backlog.clear()
                self._disk_error = ""
            except Exception as error:  # this thread must survive any error of the disk
                for batch in held:
                    batch.doubtful = True
                self._backlog = deque(held)
                if not self._disk_error:
                    self._disk_error = str(error)
                    warnings.warn(f"Metrics that MLflow does not take stay in memory, {error}", stacklevel=2)

    def _existing_queue(self) -> OfflineQueue | None:
        """The file, unless somebody has deleted it."""
        with self._moving:
            if self._offline is not None and not self._offline.path.exists():
                self._offline.close()
                self._offline, self._sent_up_to = None, 0
            return self._offline

    def _warn_of_rest(self) -> None:
        run = f"run {self.run.run_id}" if self.run is not None else "a run that could not be opened yet"
        with self._moving:  # so that the thread does not send and remove the file meanwhile
            offline = self._existing_queue()
            counts: Counter[str] = Counter()
            for batch, _ in offline.batches(self._sent_up_to) if offline is not None else ():
                counts[_PLURALS.get(batch.kind, "items")] += len(batch.items)
            unsent = ", ".join(f"{number:,} {name}" for name, number in counts.items() if number)
        if offline is not None and unsent:
            what = f"{unsent} of {run} lie in {offline.path}. Send them with: {command(self._folder)}"
        elif self._backlog:
            what = f"{len(self._backlog)} batches of {run} are lost with this process, {self._disk_error}"
        else:
            return
        reason = f" ({self._away})" if self._away is not None else ""
        warnings.warn(f"MLflow did not take everything in time{reason}: {what}", stacklevel=3)


class TerminationFlush:
    """Flushes a writer before SIGTERM's default action ends the process.

    It acts only where the default action would. Another handler (the user's, or Lightning's during training) ends the
    process in its own way, and then `finalize` or the exit of the interpreter flushes.
    """

    def __init__(self, writer: BatchWriter) -> None:
        self._writer = writer
        self._pid = os.getpid()

    def install(self) -> None:
        """Handle SIGTERM from now on, unless another handler does. Only the main thread may set signal handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def remove(self) -> None:
        """Restore the default action of SIGTERM, if this is its handler."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if signal.getsignal(signum) != self._on_sigterm:
            # Lightning's handler calls this one. It stops the training loop and must not be delayed.
            self._writer.wake()
            return
        if os.getpid() == self._pid:  # a forked worker of a data loader has the handler, but not the writer's thread
            self._writer.close(_FLUSH_S)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
