"""Sends items to a run until the store has each of them once, or has shown that it refuses the item."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from azureml_strategy.tracking.batch import LIMITS, Batch, DiskFile, TextFile, chunks, is_finite, tag
from azureml_strategy.tracking.run import LoggedMetrics, OpenRun
from azureml_strategy.tracking.store import StoreAwayError, StoreRefusedError, store_errors

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

# A server restarts a worker in less time, and the end of a run can wait that long.
SECOND_LOOK_S = 5.0
# How often in a row a store must refuse an item. A store that refuses every other request, or some at random, takes it
# at one of these attempts.
_REFUSALS_IN_A_ROW = 5
# The attempts end after so many seconds, since a storage of artifacts that is away may take minutes to refuse one.
_REFUSALS_S = 2.0
# So many answers to one question count as progress while the store takes nothing. A store that only answers questions
# is away.
_ANSWERS_THAT_COUNT = 3
# A store that took a request this recently, such as the other half of a batch, certainly takes others.
_LATELY_S = 0.2
# This tag tests whether a store takes anything, if there is no accepted metric that could be sent again.
_CHECK = ("azureml_strategy.store_check", "accepted")
# The kinds that go to where artifacts are kept.
_FILES = ("files", "artifacts")


class _Suspect(NamedTuple):
    """An item that the store refused alone while it took others."""

    kind: str
    item: Any
    since: float


class Sender:
    """Sends batches to one run.

    The store may refuse an item because of the item or because of its own state. The sender leaves an item out only if
    the store refuses it alone, refuses it alone again after `second_look_s` seconds, and right after that takes what it
    has taken before: a metric's point that it already has (MLflow keeps equal points once), or for other kinds a check
    tag. Until then the item is a suspect, and the sender goes on with all others. A store that refuses everything
    counts as away.

    Two cases need no second look: items like one that was already left out, and a parameter of which the run has
    another value.

    Attributes:
        answers: number of requests that the store has taken or answered. Of the answers to one question, only the first
            few count until the store takes something.
        left_out: number of items that the store refuses for certain.
        logged_before: what previous attempts have logged and this one must not log again.
    """

    def __init__(self, run: OpenRun, second_look_s: float = SECOND_LOOK_S) -> None:
        self._run = run
        self._second_look_s = second_look_s
        self.answers = 0
        self._answered: Counter[str] = Counter()
        self.left_out = 0
        self.logged_before: LoggedMetrics | None = None
        self.suspects: list[_Suspect] = []
        self._refused: set[tuple[str, str, bool]] = set()
        self._known_good: Metric | None = None
        self._last_taken_at = -math.inf
        self._stored = _StoredItems(self, run)
        self._asks_between = False

    def send(self, batch: Batch) -> None:
        """Send the items of the batch that the store does not have. An item that is sent or a suspect leaves the batch.

        Raises:
            StoreAwayError: the store is away. What remains in the batch must be sent later.
        """
        with store_errors():
            if self.logged_before is not None and batch.kind == "metrics":
                batch.drop([item for item in batch.items if item in self.logged_before])
            if batch.doubtful:
                batch.drop(self._stored.among(batch))
        if self._asks_between and batch.doubtful:
            # Two servers may answer at one address in turns, and one of them may be broken. Then each write after the
            # questions above could reach the broken one. One more question changes whose turn it is.
            with suppress(Exception):
                self._run.client.get_run(self._run.run_id)
        # Items like one that was refused before get a request of their own.
        requests: dict[Any, list[Any]] = {}
        for item in batch.items:
            signature = _signature(batch.kind, item)
            requests.setdefault(signature if signature in self._refused else None, []).append(item)
        for items in requests.values():
            self._deliver(batch, items)

    def answered(self, question: str) -> None:
        """Note that the store has answered a question, such as `params`."""
        self._answered[question] += 1
        self.answers += self._answered[question] <= _ANSWERS_THAT_COUNT

    def look_again(self) -> None:
        """Send those suspects again whose time has come, and judge those that the store refuses again.

        Raises:
            StoreAwayError: the store is away. They remain suspects.
        """
        due = [each for each in self.suspects if time.monotonic() - each.since >= self._second_look_s]
        for kind in LIMITS:
            for batch in chunks(kind, [each.item for each in due if each.kind == kind]):
                self._judge(kind, batch.items)

    def take_suspects(self) -> Iterator[Batch]:
        """Return the suspects as batches, and forget them."""
        taken, self.suspects = self.suspects, []
        for kind in LIMITS:
            yield from chunks(kind, [each.item for each in taken if each.kind == kind], doubtful=True)

    def _deliver(self, batch: Batch, items: list[Any]) -> None:
        try:
            self._write(batch.kind, items)
        except StoreAwayError:
            # The store may have taken the items, so what it has must be looked up again.
            batch.doubtful = True
            self._stored = _StoredItems(self, self._run)
            self._asks_between = not self._asks_between
            raise
        except StoreRefusedError as refusal:
            if len(items) > 1:
                for half in _halves(items):
                    self._deliver(batch, half)
                return
            self._suspect(batch.kind, items[0], refusal)
        batch.drop(items)

    def _suspect(self, kind: str, item: Any, refusal: StoreRefusedError) -> None:
        if time.monotonic() - self._last_taken_at > _LATELY_S and not self._takes_others(kind):
            raise StoreAwayError(f"it refuses everything: {refusal}") from None
        is_known = _signature(kind, item) in self._refused
        if not is_known and kind == "params":  # MLflow never changes a parameter
            with store_errors():
                params = self._run.client.get_run(self._run.run_id).data.params
            is_known = params.get(item.key, item.value) != item.value
        if is_known:
            self._leave_out(kind, item, refusal)
        else:
            self.suspects.append(_Suspect(kind, item, time.monotonic()))

    def _judge(self, kind: str, items: list[Any]) -> None:
        try:
            self._write(kind, items, 1 if len(items) > 1 else _REFUSALS_IN_A_ROW)
        except StoreRefusedError as refusal:
            if len(items) > 1:
                for half in _halves(items):
                    self._judge(kind, half)
                return
            self._forget_suspects(items)
            if (kind != "metrics" or self._known_good is not None) and self._takes_others(kind):
                self._leave_out(kind, items[0], refusal)
            else:
                self.suspects.append(_Suspect(kind, items[0], time.monotonic()))
            return
        self._forget_suspects(items)

    def _forget_suspects(self, items: list[Any]) -> None:
        settled = {id(item) for item in items}
        self.suspects = [each for each in self.suspects if id(each.item) not in settled]

    def _takes_others(self, kind: str) -> bool:
        """Whether the store now takes what it has taken before."""
        known_good = kind == "metrics" and self._known_good is not None
        arguments: dict[str, Any] = {"metrics": [self._known_good]} if known_good else {"tags": [tag(*_CHECK)]}
        try:
            with store_errors():
                self._run.client.log_batch(self._run.run_id, **arguments)
        except StoreRefusedError:
            return False
        return True

    def _leave_out(self, kind: str, item: Any, refusal: StoreRefusedError) -> None:
        self.left_out += 1
        signature = _signature(kind, item)
        if signature not in self._refused:
            self._refused.add(signature)
            what = item.key if kind == "files" else f"{item.key}={item.value!r}"
            warnings.warn(
                f"MLflow does not take {what} ({kind}), alone and while it takes others; it is "
                f"left out, training goes on, and others like it are tried without a further warning: {refusal}",
                stacklevel=2,
            )

    def _write(self, kind: str, items: list[Any], tries: int = 1) -> None:
        begun = time.monotonic()
        for left in reversed(range(tries)):
            try:
                self._write_once(kind, items)
                return
            except StoreRefusedError:
                if not left or time.monotonic() - begun > _REFUSALS_S:
                    raise

    def _write_once(self, kind: str, items: list[Any]) -> None:
        client, run_id = self._run.client, self._run.run_id
        if kind in _FILES:
            self._write_file(kind, items[0])
        with store_errors():
            if kind == "end":
                from mlflow.entities import RunStatus

                # Not MLflow's own `set_terminated`, which also reads the run, to print where it is.
                status = RunStatus.from_string(items[0].value)  # type: ignore[no-untyped-call]
                client._tracking_client.store.update_run_info(run_id, status, items[0].timestamp_ms, None)
            elif kind not in _FILES:
                arguments: dict[str, Any] = {kind: items}
                client.log_batch(run_id, **arguments)
        self.answers += 1
        self._answered.clear()
        self._last_taken_at = time.monotonic()
        if kind == "metrics":
            self._known_good = items[-1]

    def _write_file(self, kind: str, file: TextFile | DiskFile) -> None:
        """Write a file. Artifacts may lie elsewhere than metrics, so a failure need not mean that the store is away."""
        try:
            with store_errors():
                if kind == "files":
                    self._run.client.log_text(self._run.run_id, file.value, file.key)
                else:
                    send_file(self._run.client, self._run.run_id, Path(file.value), file.key)
        except StoreAwayError as error:
            if self._takes_others(kind):
                raise StoreRefusedError(str(error)) from None
            raise


def send_file(client: MlflowClient, run_id: str, file: Path, key: str) -> None:
    """Put a file among a run's artifacts, at a key that ends with its name. If it is gone, there is a warning."""
    if not file.is_file():
        warnings.warn(f"{file} is no longer there and is missing among the run's artifacts.", stacklevel=2)
        return
    client.log_artifact(run_id, str(file), key.rpartition("/")[0] or None)


class _StoredItems:
    """What a run already has. It asks the store once for each metric, and counts the answers with the sender."""

    def __init__(self, sender: Sender, run: OpenRun) -> None:
        self._sender = sender
        self._client = run.client
        self._run_id = run.run_id
        self._points: dict[str, set[tuple[int, int, float | None]]] = {}
        self._params: dict[str, str] | None = None

    def among(self, batch: Batch) -> list[Any]:
        """Return the items that the run has already.

        Tags, files and the end of a run are not looked up: writing them twice changes nothing.
        """
        if batch.kind == "metrics":
            return [item for item in batch.items if _point(item) in self._of_metric(item.key)]
        if batch.kind == "params":
            if self._params is None:
                self._params = dict(self._client.get_run(self._run_id).data.params)
                self._sender.answered("params")
            return [item for item in batch.items if self._params.get(item.key) == item.value]
        return []

    def _of_metric(self, name: str) -> set[tuple[int, int, float | None]]:
        if name not in self._points:
            self._points[name] = {_point(each) for each in self._client.get_metric_history(self._run_id, name)}
            self._sender.answered(f"metrics/{name}")
        return self._points[name]


def _point(metric: Metric) -> tuple[int, int, float | None]:
    """A key that is the same for equal points of a metric. A SQL store has its largest float in place of infinity."""
    value = None if metric.value != metric.value else max(-sys.float_info.max, min(metric.value, sys.float_info.max))
    return metric.step, metric.timestamp, value


def _signature(kind: str, item: Any) -> tuple[str, str, bool]:
    """A key that is the same for items which a store treats in the same way.

    A store that refuses NaN values of a metric still takes its finite ones, so these have different keys.
    """
    return kind, item.key, is_finite(item)


def _halves(items: list[Any]) -> tuple[list[Any], list[Any]]:
    middle = len(items) // 2
    return items[:middle], items[middle:]
