"""A server that is away at the start: training goes on at once, and what it logs is sent later, once."""

from __future__ import annotations

import json
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from tests.preloaded import Forked
from tests.tracking.server import Server

from azureml_strategy.cli import main
from azureml_strategy.tracking import JobMLFlowLogger, RunReport, TrackingError, writer
from azureml_strategy.tracking.batch import Batch, TextFile, param, tag
from azureml_strategy.tracking.offline_queue import OfflineQueue, find_offline_queues
from azureml_strategy.tracking.run import RunRequest

MakeLogger = Callable[..., JobMLFlowLogger]

LOG = """
import sys, time
from azureml_strategy.tracking import JobMLFlowLogger

logger = JobMLFlowLogger("away", run_name="first", tags={"kind": "test"}, flush_interval_s=0.05)
logger.log_hyperparams({"lr": 0.1})
logger.log_tags({"network.transport": "ib"})
logger.log_text("{}", "network.json")
for step in range(300):
    logger.log_metrics({"loss": step / 2, "nan": float("nan")}, step)
assert (logger.run_id or "away") == sys.argv[1], logger.run_id
print("logged", flush=True)
if sys.argv[2] == "is killed":
    time.sleep(60)
logger.finalize()
"""


@pytest.fixture
def away(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that has run once and is down now."""
    server.stop()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    return server


def _logged(client: MlflowClient, run_id: str) -> None:
    data = client.get_run(run_id).data
    assert data.params == {"lr": "0.1"}
    assert data.tags["network.transport"] == "ib"
    assert Path(client.download_artifacts(run_id, "network.json")).read_text() == "{}"
    for name in ("loss", "nan"):
        assert [metric.step for metric in client.get_metric_history(run_id, name)] == list(range(300)), name


def _upload(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["jobs", "upload-metrics", *arguments])
    return code, capsys.readouterr().out


def test_a_run_without_server_is_uploaded_by_the_command(
    away: Server, client: MlflowClient, run_script: Callable[..., Forked], capsys: Any, tmp_path: Path
) -> None:
    process = run_script(LOG, "away", "ends")
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert f"azureml-strategy jobs upload-metrics {tmp_path}" in output
    code, told = _upload(capsys, str(tmp_path))
    assert (code, "all of it stands" in told) == (1, False), "the server is still away"
    (spool,) = find_offline_queues(tmp_path)
    content = spool.path.read_bytes()
    away.start()
    assert _upload(capsys, str(tmp_path))[0] == 0
    assert find_offline_queues(tmp_path) == []
    spool.path.write_bytes(content + b'{"metrics": "lo')  # a copy, or a process that was killed in the middle of a line
    assert _upload(capsys)[0] == 0, "the same once more"
    assert _upload(capsys) == (0, f"There are no unsent metrics in {tmp_path}.\n")
    experiment = client.get_experiment_by_name("away")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["kind"]) == ("first", "FINISHED", "test")
    _logged(client, run.info.run_id)


def test_the_next_start_of_a_killed_job_sends_what_the_first_could_not(
    away: Server,
    client: MlflowClient,
    run_script: Callable[..., Forked],
    make_logger: MakeLogger,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    run_id = client.create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    process = run_script(LOG, run_id, "is killed")
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("logged"):
        assert line
    while not (spools := find_offline_queues(tmp_path)) or b'"step": 299' not in spools[0].path.read_bytes():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    away.start()
    logger = make_logger()
    logger.continue_run()
    logger.log_metrics({"loss": 7.0}, 299)  # repeated from the checkpoint on
    logger.log_metrics({"other": 7.0}, 300)
    assert logger.flush()
    _logged(client, run_id)
    assert client.get_run(run_id).data.metrics["other"] == 7.0
    assert find_offline_queues(tmp_path) == []


def test_a_server_that_comes_later_gets_all_of_it(
    away: Server, client: MlflowClient, make_logger: MakeLogger, tmp_path: Path
) -> None:
    logger = make_logger(flush_interval_s=0.05)
    with pytest.warns(UserWarning, match="MLflow is away; what is logged is kept"):
        logger.log_metrics({"loss": 0.0}, 0)
    assert not logger.flush(0.5)
    assert (logger.run_id, logger.experiment_id, logger.location, logger.metric_at_start("loss")) == (None,) * 4
    assert logger.version
    assert logger.pending_metrics()[0][:3] == ["loss", 0.0, 0]
    away.start()
    logger.log_metrics({"loss": 1.0}, 1)
    assert logger.flush()
    assert logger.pending_metrics() == []
    logger.finalize()
    assert [metric.value for metric in client.get_metric_history(logger.run_id, "loss")] == [0.0, 1.0]
    assert client.get_run(logger.run_id).info.status == "FINISHED"
    assert find_offline_queues(tmp_path) == []


def test_a_file_is_one_json_object_a_line_without_secrets(tmp_path: Path) -> None:
    request = RunRequest("https://me:hunter2@host", tags={"source": "https://me:hunter2@git"})
    spool = OfflineQueue.create(tmp_path, request)
    spool.append([Batch("tags", [tag("a", "1")]), Batch("params", [param("lr", "0.1"), param("b", "2")])])
    spool.append([Batch("files", [TextFile("x.txt", "line\nline")])])
    assert not OfflineQueue(spool.path).hold(), "one process at a time"
    spool.close()
    text = spool.path.read_text()
    assert "hunter2" not in text
    assert [next(iter(json.loads(line))) for line in text.splitlines()] == ["run", "tags", "params", "params", "files"]
    (again,) = find_offline_queues(tmp_path)
    read = [(batch.kind, [(item.key, item.value) for item in batch.items]) for batch, _ in again.batches()]
    assert read == [
        ("tags", [("a", "1")]),
        ("params", [("lr", "0.1"), ("b", "2")]),
        ("files", [("x.txt", "line\nline")]),
    ]
    assert again.request("https://host").start_id == request.start_id


def test_a_file_of_a_store_with_a_password_needs_its_address(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    OfflineQueue.create(tmp_path, RunRequest("http://me:hunter2@127.0.0.1:9", run_id="r")).close()
    code, told = _upload(capsys, str(tmp_path))
    assert (code, "--tracking-uri URI" in told) == (1, True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:9")
    code, told = _upload(capsys, str(tmp_path))
    assert (code, "Connection refused" in told, "hunter2" in told) == (1, True, False)


@pytest.mark.filterwarnings("ignore:MLflow did not take everything")
def test_a_password_is_never_shown(
    make_logger: MakeLogger, model: Any, data: Any, make_trainer: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:9")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger = make_logger()
        make_trainer(logger=logger, callbacks=[RunReport()], limit_train_batches=2, log_every_n_steps=1).fit(
            model, data
        )
    texts = "".join(str(each.message) for each in caught)
    assert "MLflow did not take everything in time" in texts
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:hunter2@127.0.0.1:9/mlflow")
    with pytest.raises(TrackingError) as raised:
        make_logger().log_metrics({"loss": 1.0})
    shown = texts + "".join(traceback.format_exception(raised.value)) + "".join(capfd.readouterr())
    assert "hunter2" not in shown


def test_a_file_of_this_machine_is_sent_once_the_server_is_back(
    away: Server,
    client: MlflowClient,
    make_logger: MakeLogger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, gone = tmp_path / "trace.json.gz", tmp_path / "gone.json.gz"
    for each in (file, gone):
        each.write_bytes(bytes(range(256)))
    logger = make_logger(experiment_name="away", run_name="first", folder=tmp_path, flush_interval_s=0.05)
    with warnings.catch_warnings(record=True), monkeypatch.context() as patched:
        patched.setattr(writer, "_PATIENCE_S", 0.5)
        logger.log_file(file, "profile")
        logger.log_file(gone, "profile")
        logger.finalize()
    (spool,) = find_offline_queues(tmp_path)
    assert str(file) in spool.path.read_text()
    gone.unlink()
    away.start()
    with pytest.warns(UserWarning, match=r"gone\.json\.gz is no longer there"):
        assert logger.flush()  # the file is its thread's, as long as this process lives
    assert find_offline_queues(tmp_path) == []
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    kept = client.download_artifacts(run.info.run_id, "profile/trace.json.gz")
    assert Path(kept).read_bytes() == bytes(range(256))
    assert [each.path for each in client.list_artifacts(run.info.run_id, "profile")] == ["profile/trace.json.gz"]


def test_a_file_that_another_process_removes_meanwhile_is_none(tmp_path: Path) -> None:
    (tmp_path / "mlflow-1.unsent.jsonl").symlink_to(tmp_path / "gone")
    assert find_offline_queues(tmp_path) == []
    sent = OfflineQueue(tmp_path / "mlflow-2.unsent.jsonl")
    assert not sent.hold()
    assert not sent.path.exists()
