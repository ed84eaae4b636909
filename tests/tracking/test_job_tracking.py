"""Trainers of scripts that do not mention tracking, in a job of one process: what the job's run has afterwards."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.tuner import Tuner
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from tests.tracking.conftest import TinyModel
from tests.tracking.server import Server
from torch.utils.data import DataLoader, IterableDataset

from azureml_strategy.cluster.environ import THROUGHPUT_SWITCH, TRACKING_SWITCH
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.tracking import JobMLFlowLogger, RunReport, ThroughputCallback
from azureml_strategy.tracking import job_tracking as module_under_test
from azureml_strategy.tracking.job_tracking import JobThroughput, JobTracking

# Lightning's own, by what is installed.
DEFAULT = TensorBoardLogger if find_spec("tensorboard") else CSVLogger
MakeTrainer = Callable[..., Trainer]
SPEED = "throughput/samples_per_second"


class TheJob:
    """The run that Azure ML opened for the job, and whatever else is in its store."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self.client, self.run_id = client, run_id

    def runs(self) -> list[Run]:
        return list(self.client.search_runs([each.experiment_id for each in self.client.search_experiments()]))

    @property
    def run(self) -> Run:
        """The job's run, which must be the only one, and run on."""
        (run,) = self.runs()
        assert run.info.run_id == self.run_id
        assert run.info.status == "RUNNING"
        assert run.info.run_name == "the-job"
        return run

    def steps(self, name: str) -> list[int]:
        return [each.step for each in self.client.get_metric_history(self.run_id, name)]


@pytest.fixture
def job(
    client: MlflowClient, job_run: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: str
) -> Iterator[TheJob]:
    mlflow.set_tracking_uri(store)  # another test's may be set, and sets the variable as well
    monkeypatch.setenv("AZUREML_RUN_ID", job_run)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow's default where Lightning is given no store
    monkeypatch.chdir(tmp_path)
    yield TheJob(client, job_run)
    mlflow.set_tracking_uri(None)  # else later tests of this process would use this test's store


@pytest.fixture
def make_trainer(make_trainer: MakeTrainer) -> MakeTrainer:
    """A Trainer with Lightning's default logger."""
    return lambda **arguments: make_trainer(**{"logger": True, "log_every_n_steps": 5} | arguments)


def attempt(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Begin an attempt of the job, as if in a new process."""
    monkeypatch.setenv("AZUREML_CR_COMPUTE_CONTEXT", json.dumps({"run_attempt_count": number}))
    monkeypatch.setattr(module_under_test, "_BEGUN", set())


def test_the_default_logger_gets_company(job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.fit(model, data, data)
    assert [type(each) for each in trainer.loggers[:-1]] == [DEFAULT]
    assert isinstance(trainer.loggers[-1], JobMLFlowLogger)
    assert isinstance(trainer.logger, DEFAULT)
    assert job.steps("train/loss") == [4, 9, 14, 19]
    assert job.run.data.params == {"lr": "0.1"}
    trainer.test_loop.verbose = False
    trainer.validate(model, data, verbose=False)
    assert job.steps("val/top1") == [19, 20]
    assert len(trainer.loggers) == 2


def test_how_fast_it_trains(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trainer = make_trainer(logger=CSVLogger(tmp_path))
    trainer.fit(model, data)
    assert job.steps(SPEED) == [9, 19]
    run = job.run
    assert run.data.metrics["summary/devices"] == 1
    assert run.data.metrics["summary/samples_per_second"] > 0
    assert run.data.tags["throughput.unit"] == "samples"
    assert "| samples/s" in capsys.readouterr().out
    assert "throughput" not in Path(trainer.log_dir, "metrics.csv").read_text()


def test_a_logger_of_the_scripts_own_gets_company(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    own = CSVLogger(tmp_path / "own")
    trainer = make_trainer(logger=[own])
    trainer.fit(model, data)
    assert trainer.loggers[0] is own
    assert job.steps("train/loss") == [4, 9, 14, 19]


@pytest.mark.parametrize("arguments", [{"logger": False}, {"logger": None, "barebones": True}], ids=str)
def test_no_logger_stays_none(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer, arguments: dict[str, Any]
) -> None:
    if "barebones" in arguments:
        trainer = Trainer(barebones=True, accelerator="cpu", devices=1, max_epochs=1)
    else:
        trainer = make_trainer(**arguments)
    trainer.fit(model, data)
    assert trainer.loggers == []
    assert job.run.data.metrics == {}


def test_a_fast_dev_run_logs_nothing(job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(fast_dev_run=True)
    trainer.fit(model, data)
    assert [type(each) for each in trainer.loggers] == [DummyLogger]
    assert job.run.data.metrics == {}


def test_our_logger_of_the_scripts_own_is_left_alone(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer
) -> None:
    own = JobMLFlowLogger(prefix="own")
    trainer = make_trainer(logger=own)
    trainer.fit(model, data)
    assert trainer.loggers == [own]
    assert job.steps("own-train/loss") == [4, 9, 14, 19]
    assert job.steps("own-" + SPEED) == [9, 19]


@pytest.mark.parametrize("switch", [TRACKING_SWITCH, THROUGHPUT_SWITCH])
def test_each_has_a_switch(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch, "off")
    make_trainer().fit(model, data)
    assert ("train/loss" in job.run.data.metrics) == (switch == THROUGHPUT_SWITCH)
    assert SPEED not in job.run.data.metrics


class Prefixing(MLFlowLogger):
    """A class of the script's own."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics({f"mine-{name}": value for name, value in metrics.items()}, step)


@pytest.mark.parametrize("kind", [MLFlowLogger, Prefixing])
@pytest.mark.parametrize("given", ["the job's store", "nothing", "the job's run"])
def test_lightnings_mlflow_logger_joins_the_run(
    job: TheJob, data: Any, make_trainer: MakeTrainer, kind: type[MLFlowLogger], given: str, store: str
) -> None:
    own = kind(
        "an-experiment",
        run_name="a-name",
        tracking_uri=None if given == "nothing" else store,
        run_id=job.run_id if given == "the job's run" else None,
        prefix="own" if kind is MLFlowLogger else "",
        tags={"color": "green"},
    )

    class Reporting(TinyModel):
        def on_train_end(self) -> None:
            assert isinstance(self.logger, kind)
            self.logger.experiment.log_text(self.logger.run_id, "hello", "own.txt")

    trainer = make_trainer(logger=own)
    for _ in range(2):
        trainer.fit(Reporting(), data)
        assert trainer.loggers == [own]
    name = "own-train/loss" if kind is MLFlowLogger else "mine-train/loss"
    assert job.steps(name)[:4] == [4, 9, 14, 19]
    assert own.run_id == job.run_id
    assert own.experiment.get_run(own.run_id).data.tags["color"] == "green"
    assert [each.path for each in own.experiment.list_artifacts(job.run_id)] == ["own.txt"]
    own.finalize("success")
    assert job.run.data.metrics[name] >= 0


def test_a_run_of_the_scripts_own_stays(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer, store: str
) -> None:
    other = job.client.create_run("0").info.run_id
    own = MLFlowLogger(run_id=other, tracking_uri=store)
    make_trainer(logger=own).fit(model, data)
    assert type(own) is MLFlowLogger
    assert own.run_id == other
    assert job.client.get_run(other).info.status == "FINISHED"
    assert job.steps("train/loss") == [4, 9, 14, 19]


def test_a_store_of_the_scripts_own_stays(job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer) -> None:
    own = MLFlowLogger(tracking_uri="sqlite:///other.db")
    make_trainer(logger=own).fit(model, data)
    assert type(own) is MLFlowLogger
    assert own.experiment.get_metric_history(own.run_id, "train/loss")
    assert job.steps("train/loss") == [4, 9, 14, 19]
    assert job.run


def test_checkpoints_are_uploaded_as_the_script_says(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer, store: str
) -> None:
    own = MLFlowLogger(tracking_uri=store, log_model=True)
    make_trainer(logger=own, enable_checkpointing=True).fit(model, data)
    assert [each.path for each in job.client.list_artifacts(job.run_id)] == ["epoch=0-step=20"]
    assert job.run


def test_a_restarted_job_logs_no_step_twice(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, limit in ((0, 12), (1, 20)):
        attempt(monkeypatch, number)
        make_trainer(log_every_n_steps=1, limit_train_batches=limit).fit(TinyModel(), data)
    assert job.steps("train/loss") == list(range(20))


def test_a_fit_from_a_checkpoint_logs_no_step_twice(
    job: TheJob, data: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = make_trainer(log_every_n_steps=1, limit_train_batches=12)
    first.fit(TinyModel(), data)
    first.save_checkpoint(tmp_path / "a.ckpt")
    attempt(monkeypatch, 0)  # as where a launcher restarts processes within a job
    make_trainer(log_every_n_steps=1, max_epochs=2, limit_train_batches=12).fit(
        TinyModel(), data, ckpt_path=tmp_path / "a.ckpt"
    )
    assert job.steps("train/loss") == list(range(24))


def test_a_second_trainer_of_a_restarted_job_loses_nothing(
    job: TheJob, data: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 1):
        attempt(monkeypatch, number)
        for _ in range(number + 1):
            make_trainer().fit(TinyModel(), data)
    assert job.steps("train/loss") == [4, 9, 14, 19] * 2


def test_trainers_in_threads(job: TheJob, data: Any, make_trainer: MakeTrainer) -> None:
    def train() -> None:
        make_trainer().fit(TinyModel(), data)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(job.steps("train/loss")) == [4, 4, 9, 9, 14, 14, 19, 19]


@pytest.mark.filterwarnings("ignore")
def test_a_tuner_logs_nothing(job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer) -> None:
    model.learning_rate = 0.1
    trainer = make_trainer()
    Tuner(trainer).lr_find(model, data, num_training=4)
    assert job.run.data.metrics == {}
    trainer.fit(model, data)
    assert job.steps("train/loss") == [4, 9, 14, 19]


def test_a_run_that_the_script_has_started_by_mlflow(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mlflow.start_run` takes MLFLOW_RUN_ID out of the environment."""
    with mlflow.start_run():
        assert "MLFLOW_RUN_ID" not in os.environ
        make_trainer().fit(model, data)
        mlflow.log_metric("own", 1.0)
        assert job.run.data.metrics["own"] == 1.0
        assert job.steps("train/loss") == [4, 9, 14, 19]


@pytest.fixture
def autolog(job: TheJob, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("_MLFLOW_LIGHTNING_AUTOLOGGING_TMP_DIR", "")  # MLflow sets it and leaves it
    mlflow.pytorch.autolog(log_models=False, checkpoint=False)
    yield
    mlflow.pytorch.autolog(disable=True)


@pytest.mark.usefixtures("autolog")
@pytest.mark.filterwarnings("ignore")
def test_what_autologging_records_is_not_recorded_again(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer()
    trainer.fit(model, data)
    assert [type(each) for each in trainer.loggers] == [DEFAULT]
    (run,) = job.runs()
    assert run.info.run_id == job.run_id
    assert len(job.steps("train/loss")) == 1


def test_a_process_that_is_not_rank_0_of_the_job_trains_alone(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer()
    (tracking,) = [each for each in trainer.callbacks if isinstance(each, JobTracking)]
    tracking._launch = Launch("pytorch", 1, 2, 0, 1, 1, 2, "127.0.0.1", 6105)
    trainer.fit(model, data)
    assert job.run.data.metrics == {}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Ours: old versions of MLflow warn of a store before each attempt."""
    ours = [each for each in caplog.records if not each.name.startswith("mlflow")]
    return [each.getMessage() for each in ours if each.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("azureml://elsewhere", "pip install -c constraints.txt '.[tracking]'"),
        ("sqlite:////dev/null/mlflow.db", "cannot be opened"),
    ],
)
def test_a_store_that_cannot_be_opened_is_one_warning(
    job: TheJob,
    data: Any,
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    uri: str,
    told: str,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr("azureml_strategy.tracking.run.find_spec", lambda name: None)
    monkeypatch.setattr(module_under_test, "_CLOSED", set())
    for _ in range(2):
        trainer = make_trainer()
        trainer.fit(TinyModel(), data)
        assert trainer.global_step == 20
        assert len(trainer.loggers) == 1
    (warning,) = warnings_of(caplog)
    assert told in warning
    assert f"{TRACKING_SWITCH}=off" in warning


@pytest.mark.parametrize("broken", ["_open", "_become", "log_metrics", "log_hyperparams", "finalize"])
def test_a_fault_of_ours_is_one_warning(
    job: TheJob,
    data: Any,
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
    store: str,
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a fault of ours")

    own: Any = True
    if broken == "_open":
        monkeypatch.setattr(JobTracking, "_open", fail)
    elif broken == "_become":
        monkeypatch.setattr(module_under_test, "_become", fail)
        own = MLFlowLogger(tracking_uri=store, run_id=job.run_id)
    else:
        monkeypatch.setattr(JobMLFlowLogger, broken, fail)
    monkeypatch.setenv(THROUGHPUT_SWITCH, "off")
    trainer = make_trainer(logger=own)
    trainer.fit(TinyModel(), data)
    assert trainer.global_step == 20
    (warning,) = warnings_of(caplog)
    assert "a fault of ours" in warning
    assert f"{TRACKING_SWITCH}=off" in warning


@pytest.mark.exhaustive
def test_a_real_server(
    server: Server, job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    make_trainer(logger=MLFlowLogger(tracking_uri=server.uri)).fit(model, data)
    make_trainer().fit(model, data)
    assert job.steps("train/loss") == [4, 9, 14, 19] * 2
    assert job.run


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([{"name": f"sample {index}", "x": torch.ones(4)} for index in range(80)])


class Manual(TinyModel):
    """Several optimizers, stepped by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch["x"]).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    @property
    def automatic_optimization(self) -> bool:
        return False

    @automatic_optimization.setter
    def automatic_optimization(self, value: bool) -> None:
        pass


def test_several_optimizers_over_a_stream(job: TheJob, make_trainer: MakeTrainer) -> None:
    make_trainer().fit(Manual(), DataLoader(Stream(), batch_size=4))
    assert job.steps(SPEED) == [9, 19]
    assert "summary/samples_per_second" in job.run.data.metrics


class Opaque(LightningModule):
    """Batches of which nobody can tell how many samples they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_batches_that_cannot_be_counted_cost_one_line(
    job: TheJob, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("lightning.pytorch").propagate = True
    make_trainer().fit(Opaque(), DataLoader(range(20), collate_fn=lambda batch: object()))  # type: ignore[arg-type]
    said = [each.getMessage() for each in caplog.records if "Throughput is not measured" in each.getMessage()]
    assert len(said) == 1
    assert "ThroughputCallback(batch_size=" in said[0]
    assert warnings_of(caplog) == []
    assert "samples/s" not in capsys.readouterr().out
    assert not any(name.startswith(("throughput", "summary")) for name in job.run.data.metrics)


@pytest.mark.parametrize("own", [ThroughputCallback(unit="images"), RunReport()], ids=lambda own: type(own).__name__)
def test_a_script_that_measures_itself_has_that_alone(
    job: TheJob, model: Any, data: Any, make_trainer: MakeTrainer, own: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(callbacks=[own])
    trainer.fit(model, data)
    (ours,) = [each for each in trainer.callbacks if isinstance(each, JobThroughput)]
    assert not ours.measures
    expected = [9, 19] if isinstance(own, ThroughputCallback) else []
    assert job.steps(SPEED) == expected
    assert "samples/s" not in capsys.readouterr().out
