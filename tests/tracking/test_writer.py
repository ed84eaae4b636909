from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.tracking import MlflowClient

from azureml_strategy.tracking import sender as sending
from azureml_strategy.tracking.batch import Batch, DiskFile, Metrics, Params, Record, Tags, TextFile, make_batches
from azureml_strategy.tracking.offline_queue import OfflineQueue, find_offline_queues
from azureml_strategy.tracking.run import OpenRun, RunRequest, join_run
from azureml_strategy.tracking.sender import Sender
from azureml_strategy.tracking.store import StoreAwayError
from azureml_strategy.tracking.writer import BatchWriter


class StrictClient(MlflowClient):
    """A real client whose store is stricter, or away for a while, as Azure ML's can be."""

    def __init__(self, store: str) -> None:
        super().__init__(store)
        self.sizes: list[int] = []
        self.away = False
        self.refuses_nan = False

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), **other: Any) -> None:
        if self.away:
            raise MlflowException("cannot reach http://me:secret@host/api")
        if self.refuses_nan and any(math.isnan(metric.value) for metric in metrics):
            raise MlflowException("no NaN here", error_code=INVALID_PARAMETER_VALUE)
        super().log_batch(run_id, metrics=metrics, params=params, **other)
        self.sizes.append(len(metrics) + len(params))


@pytest.fixture
def strict(store: str) -> StrictClient:
    return StrictClient(store)


@pytest.fixture
def run_id(strict: StrictClient) -> str:
    return strict.create_run("0").info.run_id


class StrictRequest(RunRequest):
    client: ClassVar[StrictClient]

    def open(self, again: bool = False) -> OpenRun:
        return join_run(self.tracking_uri, str(self.run_id), client=self.client)


@pytest.fixture
def make_writer(strict: StrictClient, store: str, run_id: str, tmp_path: Path) -> Iterator[Callable[..., BatchWriter]]:
    writers: list[BatchWriter] = []

    def make(**arguments: Any) -> BatchWriter:
        defaults: dict[str, Any] = {"interval_s": 60.0, "folder": tmp_path / "unsent", "second_look_s": 0.2}
        StrictRequest.client = strict
        request = StrictRequest(store, run_id)
        writers.append(BatchWriter(request, **(defaults | arguments)))
        return writers[-1]

    yield make
    strict.away = False
    for writer in writers:
        writer.close()


def history(client: MlflowClient, run_id: str, name: str) -> list[Metric]:
    return client.get_metric_history(run_id, name)


def flushed(writer: BatchWriter, *records: Record) -> bool:
    """Whether everything is written, these too, once the thread has tried."""
    for record in records:
        writer.put(record)
    writer.wake()
    while not writer.is_away or writer._busy:
        time.sleep(0.002)
    return writer.flush(timeout_s=0.1)


def test_gathers_and_writes_in_batches(
    strict: StrictClient, run_id: str, make_writer: Callable[..., BatchWriter]
) -> None:
    writer = make_writer()
    with writer._moving:  # its thread takes none before all are there
        for step in range(450):
            writer.put(Metrics({"loss": step / 2}, step, 1000 + step))
    assert writer.flush()
    assert strict.sizes == [200, 200, 50]
    written = history(strict, run_id, "loss")
    assert [(m.step, m.value, m.timestamp) for m in written] == [(n, n / 2, 1000 + n) for n in range(450)]


def test_writes_tags_and_files(strict: StrictClient, run_id: str, make_writer: Callable[..., BatchWriter]) -> None:
    writer = make_writer()
    strict.away = True
    with pytest.warns(UserWarning, match="MLflow is away"):
        assert not flushed(writer, Tags({"network.transport": "ib"}), TextFile("network.json", '{"nodes": []}'))
    strict.away = False
    assert writer.flush()
    assert strict.get_run(run_id).data.tags["network.transport"] == "ib"
    assert Path(strict.download_artifacts(run_id, "network.json")).read_text() == '{"nodes": []}'


def test_the_interval_writes_without_being_asked(
    strict: StrictClient, run_id: str, make_writer: Callable[..., BatchWriter]
) -> None:
    make_writer(interval_s=0.05).put(Metrics({"loss": 1.0}, 0, 0))
    deadline = time.monotonic() + 60
    while not history(strict, run_id, "loss"):
        assert time.monotonic() < deadline


def test_an_outage_loses_nothing(strict: StrictClient, run_id: str, make_writer: Callable[..., BatchWriter]) -> None:
    writer = make_writer(interval_s=0.01)
    strict.away = True
    with pytest.warns(UserWarning, match="is kept in .* and tried again") as warned:
        assert not flushed(writer, Metrics({"loss": 1.0}, 0, 0))
    (said,) = [str(each.message) for each in warned if "tried again" in str(each.message)]  # others are of any thread
    assert "secret" not in said
    writer.put(Metrics({"loss": 2.0}, 1, 0))
    strict.away = False
    assert writer.close()
    assert [metric.value for metric in history(strict, run_id, "loss")] == [1.0, 2.0]


@pytest.mark.filterwarnings("ignore:MLflow is away")
def test_memory_is_bounded_and_the_rest_is_in_a_file(
    strict: StrictClient, run_id: str, make_writer: Callable[..., BatchWriter], tmp_path: Path
) -> None:
    writer = make_writer(interval_s=0.01, capacity=10)
    strict.away = True
    for step in range(35):
        writer.put(Metrics({"loss": float(step)}, step, 0))
    with pytest.warns(UserWarning, match="jobs upload-metrics /.*/unsent") as warned:
        assert not writer.close(timeout_s=0.1)
    assert not any("secret" in str(each.message) for each in warned)
    (spool,) = find_offline_queues(tmp_path)
    assert [item.step for batch, _ in spool.batches() for item in batch.items] == list(range(35))
    strict.away = False
    assert writer.flush()
    assert [metric.step for metric in history(strict, run_id, "loss")] == list(range(35))
    assert find_offline_queues(tmp_path) == []


def test_what_is_being_moved_to_the_file_is_not_written(
    strict: StrictClient, make_writer: Callable[..., BatchWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, left, create = make_writer(interval_s=0.01), list[bool](), OfflineQueue.create
    writer.start()
    assert writer.flush()

    def look(*arguments: Any) -> OfflineQueue:
        left.append(writer._is_anything_left())
        return create(*arguments)

    monkeypatch.setattr(OfflineQueue, "create", look)
    passed = threading.Event()
    with monkeypatch.context() as patch:
        # The thread may still send, as `flush` has woken it: it is to have ended that, and not to begin again.
        patch.setattr(writer, "_drain", passed.set)
        writer.wake()
        assert passed.wait(60)
        writer._away, writer._resume_at = StoreAwayError("gone"), time.monotonic() + 600  # until then records are kept
        writer.put(Metrics({"loss": 1.0}, 0, 0))
        deadline = time.monotonic() + 60
        while not writer._offline:
            assert time.monotonic() < deadline
            time.sleep(0.002)
    assert left == [True]
    assert writer.flush()


@pytest.mark.filterwarnings("ignore:MLflow is away")
def test_a_disk_that_cannot_be_written_keeps_points_in_memory(
    strict: StrictClient, run_id: str, make_writer: Callable[..., BatchWriter], tmp_path: Path
) -> None:
    (tmp_path / "unsent").write_text("a file where the folder should be")
    writer = make_writer(interval_s=0.01)
    strict.away = True
    with pytest.warns(UserWarning, match="stay in memory"):
        assert not flushed(writer, Metrics({"loss": 1.0}, 0, 0))
    with pytest.warns(UserWarning, match="1 batches of run .* are lost with this process"):
        assert not writer.close(timeout_s=0.1)
    strict.away = False
    assert writer.close()
    assert len(history(strict, run_id, "loss")) == 1


def test_a_slow_store_slows_the_caller_and_loses_nothing(
    strict: StrictClient, run_id: str, make_writer: Callable[..., BatchWriter]
) -> None:
    writer = make_writer(interval_s=0.01, capacity=10)
    for step in range(500):
        writer.put(Metrics({"loss": float(step)}, step, 0))
    assert writer.close()
    assert len(history(strict, run_id, "loss")) == 500


def test_a_refused_value_takes_only_itself_along(
    strict: StrictClient, run_id: str, make_writer: Callable[..., BatchWriter]
) -> None:
    strict.refuses_nan = True
    writer = make_writer()
    for step in range(8):
        writer.put(Metrics({"loss": math.nan if step in (3, 5) else float(step), "lr": 0.1}, step, 0))
    with pytest.warns(UserWarning, match="does not take loss=nan") as warned:
        assert writer.flush()
    assert sum("does not take" in str(each.message) for each in warned) == 1
    assert [metric.step for metric in history(strict, run_id, "loss")] == [0, 1, 2, 4, 6, 7]
    assert len(history(strict, run_id, "lr")) == 8
    strict.refuses_nan = False
    writer.put(Metrics({"loss": math.nan}, 8, 0))
    assert writer.flush()
    assert len(history(strict, run_id, "loss")) == 7, "every value is tried, also of a metric that was refused before"


def test_a_parameter_changed_behind_our_back_is_refused_alone(
    strict: StrictClient, run_id: str, make_writer: Callable[..., BatchWriter]
) -> None:
    strict.log_param(run_id, "lr", "0.1")
    writer = make_writer(second_look_s=60.0)  # the run says why: nothing to wait for
    writer.put(Params({"lr": "0.2", "depth": "3"}))
    with pytest.warns(UserWarning, match="does not take lr='0.2'"):
        assert writer.flush()
    assert strict.get_run(run_id).data.params == {"lr": "0.1", "depth": "3"}


def test_can_be_used_again_after_closing(
    strict: StrictClient, run_id: str, make_writer: Callable[..., BatchWriter]
) -> None:
    writer = make_writer()
    assert writer.close()
    for step in range(2):
        writer.put(Metrics({"loss": 1.0}, step, 0))
        assert writer.close()
    assert len(history(strict, run_id, "loss")) == 2


def test_what_the_store_has_not_taken(strict: StrictClient, make_writer: Callable[..., BatchWriter]) -> None:
    """For a checkpoint: in order, whether it waits to be put into a batch or its batch was refused already."""
    writer = make_writer()
    writer.put(Metrics({"loss": 0.5}, 1, 7))
    assert writer.flush()
    assert writer.pending_metrics() == []
    strict.away = True
    with pytest.warns(UserWarning, match="is kept in .* and tried again"):
        assert not flushed(writer, Metrics({"loss": 0.25, "top1": 0.1}, 2, 8), Params({"lr": "0.1"}))
    writer.put(Metrics({"loss": 0.125}, 3, 9))
    kept = [(each.key, each.value, each.step, each.timestamp) for each in writer.pending_metrics()]
    assert kept == [("loss", 0.25, 2, 8), ("top1", 0.1, 2, 8), ("loss", 0.125, 3, 9)]


def _again(sender: Sender, times: int) -> None:
    """Send a point that may stand already, and a parameter, as often as this."""
    for _ in range(times):
        for batch in make_batches([Metrics({"loss": 0.5}, 1, 7), Params({"lr": "0.1"})]):
            batch.doubtful = True
            with suppress(StoreAwayError):
                sender.send(batch)


def test_a_store_that_can_only_be_read_makes_no_progress(strict: StrictClient, store: str, run_id: str) -> None:
    """The end of a run waits while there is progress: for a full disk of the store's it would wait for ever."""
    sender = Sender(join_run(store, run_id, client=strict))
    strict.away = True
    _again(sender, 5)
    before = sender.answers
    _again(sender, 5)
    assert sender.answers == before
    strict.away = False
    _again(sender, 1)
    assert sender.answers > before


def test_after_an_outage_a_new_batch_is_one_request(
    strict: StrictClient, store: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(join_run(store, run_id, client=strict))
    strict.away = True
    _again(sender, 1)
    sender._asks_between, strict.away = True, False
    monkeypatch.setattr(strict, "get_run", lambda run_id: pytest.fail("a question that nothing is to be learned from"))
    for batch in make_batches([Metrics({"loss": 0.25}, 2, 8)]):
        sender.send(batch)
    assert len(history(strict, run_id, "loss")) == 1


def test_a_storage_of_files_that_takes_long_to_refuse_is_asked_once(
    strict: StrictClient, store: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[str] = []

    def away(*arguments: Any) -> None:
        uploads.append(str(arguments))
        raise StoreAwayError("no answer for two minutes")

    sender = Sender(join_run(store, run_id, client=strict), second_look_s=0.0)
    monkeypatch.setattr(sending, "send_file", away)
    monkeypatch.setattr(sending, "_REFUSALS_S", -1.0)
    sender.send(Batch("artifacts", [DiskFile("page.html", str(tmp_path / "page.html"))]))
    with pytest.warns(UserWarning, match="does not take"):
        sender.look_again()
    assert len(uploads) == 2


def test_the_file_of_what_is_left_stays_while_it_is_counted(
    strict: StrictClient, make_writer: Callable[..., BatchWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make_writer()
    strict.away = True
    with pytest.warns(UserWarning, match="is kept in"):
        assert not flushed(writer, Metrics({"loss": 0.5}, 1, 7))
    batches, held = OfflineQueue.batches, []

    def reading(spool: OfflineQueue, start: int = 0) -> Any:
        held.append(writer._moving._is_owned())  # type: ignore[attr-defined]
        return batches(spool, start)

    monkeypatch.setattr(OfflineQueue, "batches", reading)
    with pytest.warns(UserWarning, match="1 points of metrics of run"):
        writer._warn_of_rest()
    assert held == [True]
