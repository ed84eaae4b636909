from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from mlflow.tracking import MlflowClient
from tests.preloaded import Forked

from azureml_strategy.tracking import JobMLFlowLogger, TrackingError

MakeLogger = Callable[..., JobMLFlowLogger]
MakeTrainer = Callable[..., Trainer]


def steps(client: MlflowClient, run_id: str | None, name: str) -> list[int]:
    return [metric.step for metric in client.get_metric_history(run_id, name)]


def test_nothing_happens_before_the_first_use(tmp_path: Path, make_logger: MakeLogger) -> None:
    make_logger()
    assert list(tmp_path.iterdir()) == []


def test_a_fit_in_a_job_logs_into_its_run_and_leaves_it_open(
    client: MlflowClient, job_run: str, model: Any, data: Any, make_trainer: MakeTrainer
) -> None:
    logger = JobMLFlowLogger("another-experiment", run_name="another-name")
    make_trainer(logger=logger, log_every_n_steps=5).fit(model, data)
    run = client.get_run(job_run)
    assert logger.run_id == job_run
    assert (run.info.status, run.info.run_name) == ("RUNNING", "the-job")
    assert run.data.params == {"lr": "0.1"}
    assert steps(client, job_run, "train/loss") == [4, 9, 14, 19]
    assert [experiment.name for experiment in client.search_experiments()] == ["the-jobs-experiment", "Default"]


def test_the_environment_is_read_when_used(
    client: MlflowClient, make_logger: MakeLogger, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = make_logger()
    run_id = client.create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    assert logger.run_id == run_id


def test_a_run_of_our_own_is_finished(
    client: MlflowClient, store: str, model: Any, data: Any, make_trainer: MakeTrainer
) -> None:
    logger = JobMLFlowLogger("mine", run_name="first", tracking_uri=store, tags={"kind": "test"}, prefix="p")
    make_trainer(logger=logger, log_every_n_steps=10).fit(model, data)
    run = client.get_run(logger.run_id)
    assert (run.info.status, run.info.run_name, run.data.tags["kind"]) == ("FINISHED", "first", "test")
    assert steps(client, logger.run_id, "p-train/loss") == [9, 19]


class Fails(Callback):
    def on_train_batch_end(self, *arguments: Any) -> None:
        if arguments[-1] == 6:
            raise ValueError("on purpose")


@pytest.mark.parametrize(("joined", "status"), [(False, "FAILED"), (True, "RUNNING")])
def test_an_exception_loses_nothing(
    joined: bool, status: str, client: MlflowClient, store: str, model: Any, data: Any, make_trainer: MakeTrainer
) -> None:
    run_id = client.create_run("0").info.run_id if joined else None
    logger = JobMLFlowLogger(tracking_uri=store, run_id=run_id, flush_interval_s=3600)
    with pytest.raises(ValueError, match="on purpose"):
        make_trainer(logger=logger, callbacks=[Fails()], log_every_n_steps=1).fit(model, data)
    assert client.get_run(logger.run_id).info.status == status
    assert steps(client, logger.run_id, "train/loss") == [0, 1, 2, 3, 4, 5]


FIT = """
import os, sys, time
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from azureml_strategy.tracking import JobMLFlowLogger

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Ready(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 3:
            print("ready", logger.run_id, flush=True)
        if batch_idx > 3:
            time.sleep(0.02)

logger = JobMLFlowLogger(flush_interval_s=3600)
if sys.argv[1] == "used before":
    logger.log_metrics({"before": 1.0})
trainer = Trainer(accelerator="cpu", logger=logger, callbacks=[Ready()], max_epochs=1, log_every_n_steps=1,
                  enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(100_000, 1)))
"""


@pytest.mark.parametrize("use", ["fresh", "used before"])
def test_sigterm_in_fit_stops_the_loop_and_loses_nothing(
    use: str,
    client: MlflowClient,
    store: str,
    run_script: Callable[..., Forked],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    process = run_script(FIT, use)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("ready"):
        assert line
    process.terminate()
    output, _ = process.communicate(timeout=150)
    run_id = line.split()[1]
    # Lightning unwound the process; the signal's default action, which leaves no time, did not end it.
    assert process.returncode != -signal.SIGTERM, output
    assert client.get_run(run_id).info.status == "KILLED"
    logged = steps(client, run_id, "loss")
    assert logged == list(range(len(logged)))
    assert len(logged) >= 4


def test_a_retried_job_keeps_its_first_hyperparameters(
    client: MlflowClient, job_run: str, make_logger: MakeLogger
) -> None:
    first = make_logger()
    first.log_hyperparams({"lr": 0.1, "model": {"depth": 3}})
    first.finalize()
    second = make_logger()
    with pytest.warns(UserWarning, match=r"lr=0\.1 \(now 0\.2\)"):
        second.log_hyperparams({"lr": 0.2, "model": {"depth": 3}, "new": "x" * 1000})
    second.log_metrics({"loss": 1.0}, step=0)
    second.finalize()
    assert client.get_run(job_run).data.params == {"lr": "0.1", "model/depth": "3", "new": "x" * 250}
    assert steps(client, job_run, "loss") == [0]


def test_hundreds_of_hyperparameters(client: MlflowClient, job_run: str, make_logger: MakeLogger) -> None:
    logger = make_logger()
    logger.log_hyperparams({f"p{n}": n for n in range(333)})
    assert logger.flush()
    assert len(client.get_run(job_run).data.params) == 333


def test_an_unknown_run_is_an_error(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "gone")
    with pytest.raises(TrackingError, match=r"MLFLOW_RUN_ID=gone .*mlflow\.db"):
        _ = JobMLFlowLogger(tracking_uri=store).experiment


def test_validate_after_fit_logs_into_the_same_run(
    client: MlflowClient, store: str, model: Any, data: Any, make_trainer: MakeTrainer
) -> None:
    logger = JobMLFlowLogger(tracking_uri=store)
    trainer = make_trainer(logger=logger, limit_train_batches=2)
    trainer.fit(model, data)
    run_id = logger.run_id
    trainer.validate(model, data, verbose=False)
    assert logger.run_id == run_id
    assert client.get_run(run_id).data.metrics["val/top1"] == 0.75
    assert client.get_run(run_id).info.status == "FINISHED"


def test_checkpoints_are_uploaded_as_lightning_does(
    client: MlflowClient, store: str, model: Any, data: Any, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    logger = JobMLFlowLogger(tracking_uri=store, log_model=True, artifact_location=str(tmp_path / "artifacts"))
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", filename="best")
    trainer = make_trainer(logger=logger, callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(model, data)
    artifacts = {artifact.path for artifact in client.list_artifacts(logger.run_id, "best")}
    assert artifacts == {"best/best.ckpt", "best/metadata.yaml", "best/aliases.txt"}


def test_other_ranks_know_the_jobs_run_and_write_nothing(
    client: MlflowClient, job_run: str, make_logger: MakeLogger, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_utilities.core.rank_zero import rank_zero_only

    logger = make_logger()
    with monkeypatch.context() as patch:
        patch.setattr(rank_zero_only, "rank", 1)
        logger.log_metrics({"loss": 1.0})
        logger.log_hyperparams({"lr": 1})
        logger.finalize()
        assert logger.run_id == logger.version == job_run
        assert logger.experiment_id is None
    assert client.get_run(job_run).data.metrics == {}


def test_a_copy_joins_the_run_and_does_not_end_it(client: MlflowClient, store: str, make_logger: MakeLogger) -> None:
    logger = make_logger(tracking_uri=store)
    logger.log_metrics({"loss": torch.tensor(2.0)}, step=1)
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"loss": 1.0}, step=2)
    copy.finalize()
    assert client.get_run(logger.run_id).info.status == "RUNNING"
    assert logger.flush()
    assert sorted(steps(client, logger.run_id, "loss")) == [1, 2]


def test_what_one_attempt_has_not_written_the_next_one_does(
    client: MlflowClient, job_run: str, make_logger: MakeLogger
) -> None:
    first = make_logger(flush_interval_s=60)
    first.log_metrics({"loss": 0.5}, step=1)
    assert first.flush()
    first.log_metrics({"loss": 0.25, "top1": 0.1}, step=2)
    kept = first.pending_metrics()
    assert [each[:3] for each in kept] == [["loss", 0.25, 2], ["top1", 0.1, 2]]
    again = make_logger(flush_interval_s=60)
    again.continue_run()
    again.log_pending(kept)
    again.log_metrics({"loss": 0.125}, step=3)
    assert again.flush()
    assert steps(client, job_run, "loss") == [1, 2, 3]
    assert steps(client, job_run, "top1") == [2]
    assert client.get_metric_history(job_run, "loss")[1].timestamp == kept[0][3], "when it was logged"


def _logged(logger: JobMLFlowLogger, steps: range) -> bool:
    for step in steps:
        logger.log_metrics({"loss": float(step)}, step=step)
    return logger.flush(timeout_s=8)


@pytest.mark.slow
def test_a_server_that_goes_and_comes_back(
    server: Any, client: MlflowClient, make_logger: MakeLogger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    logger = make_logger(run_name="over-http", flush_interval_s=0.1)
    logger.log_metrics({"loss": 0.0}, step=0)
    assert logger.flush()
    run_id = logger.run_id
    assert logger.location.open_with == f"{server.uri}/#/experiments/{logger.experiment_id}/runs/{run_id}"
    assert steps(client, run_id, "loss") == [0]
    server.stop()
    with pytest.warns(UserWarning, match="is kept in .* and tried again"):
        assert not _logged(logger, range(1, 6))
    server.start()
    assert logger.flush()
    logger.finalize()
    assert steps(client, run_id, "loss") == [0, 1, 2, 3, 4, 5]
    assert client.get_run(run_id).info.status == "FINISHED"


def test_a_suggestion_names_and_tags_a_run_of_our_own(
    client: MlflowClient, store: str, make_logger: MakeLogger, job_run: str
) -> None:
    joined = make_logger(tags={"a": "mine"})
    joined.suggest("suggested", {"a": "1", "b": "2"})
    joined.log_metrics({"loss": 1.0})
    assert joined.flush()
    run = client.get_run(job_run)
    assert (run.info.run_name, run.data.tags["a"], run.data.tags["b"]) == ("the-job", "mine", "2")


def test_the_epoch_that_a_user_logs_stays(client: MlflowClient, store: str, make_logger: MakeLogger) -> None:
    logger = make_logger(tracking_uri=store)
    for step in (None, None, 1, 1, 2):
        logger.log_metrics({"epoch": 0, "x": 0.0}, step)
        time.sleep(0.002)  # MLflow keeps points of the same millisecond once
    assert logger.flush()
    assert steps(client, logger.run_id, "x") == [0, 0, 1, 1, 2]
    assert steps(client, logger.run_id, "epoch") == [0, 0, 1, 2]


def test_a_place_of_artifacts_that_takes_nothing_costs_the_artifacts_alone(
    client: MlflowClient, store: str, tmp_path: Path, make_logger: MakeLogger
) -> None:
    (tmp_path / "file").touch()
    logger = make_logger(
        experiment_name="no artifacts", tracking_uri=store, artifact_location=f"file://{tmp_path}/file/artifacts"
    )
    logger.log_text("a: 1", "config.yaml")
    logger.log_metrics({"loss": 1.0}, 3)
    with pytest.warns(UserWarning, match=r"does not take config\.yaml \(files\)"):
        assert logger.flush()
    assert steps(client, logger.run_id, "loss") == [3]
    assert not list(tmp_path.glob("**/*.unsent.jsonl"))
