from __future__ import annotations

import json
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from mlflow.tracking import MlflowClient
from tests.control.stores import shared
from tests.network.conftest import Tree
from tests.tracking.conftest import TinyModel
from torch.distributed import TCPStore
from torch.utils.data import DataLoader

from azureml_strategy.tracking import JobMLFlowLogger, NodeCounters
from azureml_strategy.tracking.counters import THREAD, _CounterThread

CPU = "system/cpu_utilization_percentage"


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == THREAD]


class Until(Callback):
    """Holds a batch until something is there, and acts before."""

    def __init__(self, batch: int, there: Callable[[NodeCounters], Any], act: Callable[[], Any] = lambda: None) -> None:
        self._batch, self._there, self._act = batch, there, act

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != self._batch:
            return
        self._act()
        (counters,) = [each for each in trainer.callbacks if isinstance(each, NodeCounters)]
        wait_until(lambda: self._there(counters))


def wait_until(there: Callable[[], Any]) -> None:
    while not there():
        time.sleep(0.01)


def has_figures(counters: NodeCounters) -> bool:
    return bool(counters._thread and counters._thread.figures)


def has_warnings(counters: NodeCounters) -> bool:
    return bool(counters._thread and counters._thread.warnings)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path / "root")
    tree.hca("mlx5_ib0")
    tree.write("sys/class/infiniband/mlx5_ib0/ports/1/counters/link_downed", "0")
    return tree


@pytest.fixture
def fit(
    make_trainer: Callable[..., Trainer], make_logger: Callable[..., JobMLFlowLogger], store: str, tree: Tree
) -> Callable[..., JobMLFlowLogger]:
    def run(*callbacks: Callback, data: DataLoader, **arguments: Any) -> JobMLFlowLogger:
        logger = make_logger(tracking_uri=store, artifact_location=(tree.root / "files").as_uri())
        counters = NodeCounters(interval_s=0.02, sysfs=tree.root / "sys")
        make_trainer(callbacks=[*callbacks, counters], **{"logger": logger, **arguments}).fit(TinyModel(), data)
        return logger

    return run


def test_they_are_logged_at_the_step_of_the_other_metrics(
    fit: Callable[..., JobMLFlowLogger], data: DataLoader, client: MlflowClient
) -> None:
    logger = fit(Until(7, has_figures), data=data, log_every_n_steps=1)
    points = client.get_metric_history(logger.run_id, CPU)
    assert 7 in [each.step for each in points]
    steps = {each.step for each in client.get_metric_history(logger.run_id, "train/loss")}
    assert {each.step for each in points} <= steps | {20}
    metrics = client.get_run(logger.run_id).data.metrics
    assert metrics["system/infiniband_link_downs"] == 0
    assert metrics["system/disk_available_megabytes"] > 0
    assert threads() == []


def test_a_counter_that_counts_up_during_a_run_is_told_once_with_the_node(
    fit: Callable[..., JobMLFlowLogger],
    data: DataLoader,
    client: MlflowClient,
    tree: Tree,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tree.root / "sys/class/infiniband/mlx5_ib0/ports/1/counters/link_downed"
    told = Until(5, has_warnings, lambda: file.write_text("3"))
    again = Until(9, has_figures, lambda: file.write_text("4"))
    logger = fit(Until(1, has_figures), told, again, Until(12, has_figures), data=data)
    expected = f"Node {socket.gethostname()}: the InfiniBand port mlx5_ib0:1 counted 3 link_downed"
    assert [record.getMessage()[: len(expected)] for record in caplog.records if "Node" in record.getMessage()] == [
        expected
    ]
    events = Path(client.download_artifacts(logger.run_id, "events/attempt_0.jsonl", str(tmp_path)))
    (event,) = [json.loads(line) for line in events.read_text().splitlines()]
    assert (event["kind"], event["text"][: len(expected)], event["step"]) == ("warning", expected, 6)


def test_other_loggers_have_them_too(
    make_trainer: Callable[..., Trainer], data: DataLoader, tree: Tree, tmp_path: Path
) -> None:
    logger = CSVLogger(tmp_path, version="")
    counters = NodeCounters(interval_s=0.02, sysfs=tree.root / "sys")
    make_trainer(logger=logger, callbacks=[Until(3, has_figures), counters]).fit(TinyModel(), data)
    assert CPU in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]


class Breaks(Callback):
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        assert len(threads()) == 1
        raise self._error


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_an_exception_ends_the_thread(
    make_trainer: Callable[..., Trainer], data: DataLoader, tree: Tree, error: BaseException
) -> None:
    trainer = make_trainer(callbacks=[NodeCounters(0.02, tree.root / "sys"), Breaks(error)])
    with pytest.raises((ValueError, SystemExit)):
        trainer.fit(TinyModel(), data)
    assert threads() == []


def test_a_fit_after_a_fit(make_trainer: Callable[..., Trainer], data: DataLoader, tree: Tree) -> None:
    trainer = make_trainer(callbacks=[NodeCounters(0.02, tree.root / "sys"), Until(3, has_figures)])
    trainer.fit(TinyModel(), data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(TinyModel(), data)
    trainer.validate(TinyModel(), data)
    assert threads() == []


def test_workers_of_a_data_loader_that_are_forked(
    make_trainer: Callable[..., Trainer], data: DataLoader, tree: Tree
) -> None:
    loader: DataLoader = DataLoader(data.dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
    trainer = make_trainer(callbacks=[NodeCounters(0.001, tree.root / "sys"), Until(3, has_figures)])
    trainer.fit(TinyModel(), loader)
    assert trainer.global_step == 20
    assert threads() == []


def test_without_psutil_it_is_said_in_one_sentence(
    fit: Callable[..., JobMLFlowLogger],
    data: DataLoader,
    client: MlflowClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setitem(sys.modules, "psutil", None)
    logger = fit(Until(3, lambda _: not threads()), data=data)
    told = [record.getMessage() for record in caplog.records if "ounters" in record.getMessage()]
    assert len(told) == 1
    assert told[0].endswith("pip install -c constraints.txt '.[counters]' in a clone of azureml-strategy.")
    assert "Traceback" not in capfd.readouterr().err
    assert not any(name.startswith("system/") for name in client.get_run(logger.run_id).data.metrics)


def test_a_copy_has_no_thread(make_trainer: Callable[..., Trainer], data: DataLoader, tree: Tree) -> None:
    class Copied(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            assert trainer.callbacks[0]._thread is not None
            assert pickle.loads(pickle.dumps(trainer.callbacks[0]))._thread is None

    make_trainer(callbacks=[NodeCounters(0.02, tree.root / "sys"), Copied()], max_steps=2).fit(TinyModel(), data)


def test_a_store_that_is_lost_costs_the_other_nodes_counters_alone(
    tree: Tree, capfd: pytest.CaptureFixture[str]
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(2)]
    stores = shared(2, clients)
    nodes: list[Any] = [
        SimpleNamespace(is_global_zero=rank == 0, num_nodes=2, node_rank=rank, checkpoint_callback=None)
        for rank in range(2)
    ]
    first, second = (
        _CounterThread(node, 0.02, tree.root / "sys", store) for node, store in zip(nodes, stores, strict=True)
    )
    wait_until(lambda: len(first.figures) == 2)
    assert "system/node_1/cpu_utilization_percentage" in first.take()

    del server
    sent, received = second._samples, first._samples
    wait_until(lambda: second._samples > sent + 2)  # what was sent before is read
    wait_until(lambda: first._samples > received + 2)
    heard, received = first._last_sample["node_1"], first._samples
    wait_until(lambda: first._samples > received + 5)
    assert first._last_sample["node_1"] == heard
    assert "system/node_0/cpu_utilization_percentage" in first.take()
    for thread in (first, second):
        thread.close()
    assert threads() == []
    assert "Traceback" not in capfd.readouterr().err


def test_an_interval_must_be_a_time() -> None:
    with pytest.raises(ValueError, match="interval_s=0 is no time"):
        NodeCounters(interval_s=0)
