"""The thread that writes to MLflow, so that training does not wait for it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.tracking.batch import Batch, Record, is_finite, make_batches
from azureml_strategy.tracking.earlier import EarlierMetrics

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

# Errors of MLflow that a later attempt would meet again: the store refuses what is in the batch.
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


class BatchWriter:
    """Writes records to one run, in batches, on a thread of its own.

    MLflow's client retries a busy or unreachable server by itself (429, 5xx, connection errors: 7 times over about
    four minutes). When it gives up, the batch is kept and tried again, in order, for as long as the process lives.
    Where the store refuses an item (a NaN on a store that knows none, a name too many) the rest of its batch is
    still written, and one warning names what was left out.

    Memory is bounded: a store that is slow slows the run down before records are lost; only while it does not take
    anything at all does the oldest record make place for the newest.

    Args:
        client: writes; used on the thread only.
        run_id: the run to write to.
        interval_s: how long records gather before they are written, in seconds.
        capacity: the most records held; a record is one call of `log_metrics`.
    """

    def __init__(self, client: MlflowClient, run_id: str, interval_s: float = 1.0, capacity: int = 20_000) -> None:
        self._client = client
        self._run_id = run_id
        self._interval_s = interval_s
        self._capacity = capacity
        self._records: deque[Record] = deque(maxlen=capacity)
        self._backlog: deque[Batch] = deque()
        # Unlike an Event, a SimpleQueue may be put to from a signal handler that interrupts its own put.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._busy = False
        self._failing = False
        self._written = 0
        self._lost = 0
        self._refused: set[tuple[str, str, bool]] = set()
        self._earlier: EarlierMetrics | None = None
        self._moving = threading.Lock()  # while something is in neither of the two queues

    def leave_out(self, earlier: EarlierMetrics) -> None:
        """Write no metric again that an earlier attempt has written."""
        self._earlier = earlier

    def put(self, record: Record) -> None:
        """Queue a record; returns at once unless the store cannot keep up."""
        if self._thread is None:
            self._start()
        while len(self._records) >= self._capacity and not self._failing:
            time.sleep(0.01)
        self._lost += len(self._records) >= self._capacity
        self._records.append(record)

    def unwritten(self) -> list[Metric]:
        """The metrics that the store has not taken yet, in order; one that it is just taking is among them."""
        with self._moving:
            batches = [*self._backlog, *make_batches(self._records)]
        return [item for batch in batches if batch.kind == "metrics" for item in batch.items]

    def wake(self) -> None:
        """Write what is queued now instead of at the end of the interval. Safe in a signal handler."""
        self._wake.put(None)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything queued so far is written.

        Polls instead of waiting on a lock, because a signal handler may call it while it runs.

        Args:
            timeout_s: how long to wait after the last batch that the store took, in seconds.

        Returns:
            Whether nothing is left.
        """
        self.wake()
        written, deadline = self._written, time.monotonic() + timeout_s
        # The order matters: the thread says that it is busy before it takes a record away.
        while self._records or self._busy:
            if self._written != written:
                written, deadline = self._written, time.monotonic() + timeout_s
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def close(self, timeout_s: float = 60.0) -> bool:
        """Flush and end the thread; a later `put` starts it again.

        Warns of what was not written; the thread goes on trying until the process ends.

        Returns:
            Whether everything was written.
        """
        if self._thread is None:
            return True
        complete = self.flush(timeout_s)
        if complete:
            self._closing = True
            self.wake()
            self._thread.join()
            self._thread = None
        atexit.unregister(self.close)
        self._warn_of_losses()
        return complete and not self._lost

    def _start(self) -> None:
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mlflow-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _run(self) -> None:
        while not self._closing:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=self._interval_s)
            self._drain()

    def _drain(self) -> None:
        self._busy = True
        try:
            while self._backlog or self._records:
                if not self._backlog:
                    with self._moving:
                        self._backlog.extend(make_batches(self._take()))
                    continue
                self._write(self._backlog[0])
                with self._moving:
                    self._backlog.popleft()
                self._written += 1
                self._failing = False
            self._busy = False
        except Exception as error:  # whatever a store raises: this thread must outlive an outage
            self._report_outage(error)

    def _take(self) -> list[Record]:
        return [self._records.popleft() for _ in range(min(len(self._records), 1000))]

    def _write(self, batch: Batch) -> None:
        from mlflow.exceptions import MlflowException

        items = [item for item in batch.items if self._signature(batch, item) not in self._refused]
        if self._earlier is not None and batch.kind == "metrics":
            items = [item for item in items if item not in self._earlier]
        if not items:
            return
        try:
            self._send(batch.kind, items)
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            if len(items) == 1:
                self._refuse(batch, items[0], error)
            else:
                for half in Batch(batch.kind, items).halves():
                    self._write(half)

    def _send(self, kind: str, items: list[Any]) -> None:
        if kind == "files":
            for file in items:
                self._client.log_text(self._run_id, file.value, file.key)
        else:
            arguments: dict[str, Any] = {kind: items}
            self._client.log_batch(self._run_id, **arguments)

    @staticmethod
    def _signature(batch: Batch, item: Any) -> tuple[str, str, bool]:
        # A store that refuses a metric's NaN still takes its numbers.
        return batch.kind, item.key, is_finite(item)

    def _refuse(self, batch: Batch, item: Any, error: Exception) -> None:
        self._refused.add(self._signature(batch, item))
        warnings.warn(
            f"MLflow does not take {item.key}={item.value!r} ({batch.kind}); it and others like it are left out, "
            f"training goes on: {redact_text(str(error))}",
            stacklevel=2,
        )

    def _report_outage(self, error: Exception) -> None:
        if not self._failing:
            warnings.warn(
                f"MLflow did not take {self._backlog[0].describe() if self._backlog else 'a batch'}; it is kept and "
                f"tried again, training goes on: {redact_text(f'{type(error).__name__}: {error}')}",
                stacklevel=2,
            )
        self._failing = True

    def _warn_of_losses(self) -> None:
        waiting = len(self._records) + len(self._backlog)
        if waiting or self._lost:
            first = f", first of them {self._backlog[0].describe()}" if self._backlog else ""
            warnings.warn(
                f"MLflow was not reachable: {waiting} records or batches were not written to run {self._run_id} and "
                f"{self._lost} older ones were dropped for want of memory{first}.",
                stacklevel=3,
            )
