"""Stores, loggers and a model for the tests of tracking."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from mlflow.tracking import MlflowClient
from tests.preloaded import Forked
from tests.tracking.server import Server
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.tracking import JobMLFlowLogger


@pytest.fixture(scope="session")
def _empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "empty.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()  # MLflow makes the tables, which takes seconds
    return path


@pytest.fixture
def store(_empty_store: Path, tmp_path: Path) -> str:
    shutil.copy(_empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def client(store: str) -> MlflowClient:
    return MlflowClient(store)


@pytest.fixture
def job_run(client: MlflowClient, monkeypatch: pytest.MonkeyPatch, store: str) -> str:
    """A run that a job opened and named to this process, as Azure ML does."""
    experiment = client.create_experiment("the-jobs-experiment")
    run_id = client.create_run(experiment, run_name="the-job").info.run_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    return run_id


@pytest.fixture
def make_logger() -> Iterator[Callable[..., JobMLFlowLogger]]:
    loggers: list[JobMLFlowLogger] = []

    def make(**arguments: Any) -> JobMLFlowLogger:
        loggers.append(JobMLFlowLogger(**arguments))
        return loggers[-1]

    yield make
    for logger in loggers:
        logger.finalize()


class TinyModel(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val/top1", torch.tensor(0.75))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture
def data() -> DataLoader:
    """Twenty batches of four samples."""
    return DataLoader(TensorDataset(torch.ones(80, 4)), batch_size=4)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(**arguments: Any) -> Trainer:
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "default_root_dir": tmp_path,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return Trainer(**(defaults | arguments))

    return make


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., Forked]:
    """Start a Python program of the given text, its output in a pipe."""

    def start(text: str, *arguments: str) -> Forked:
        script = tmp_path / "script.py"
        script.write_text(text)
        return Forked([str(script), *arguments], os.environ, text=True)

    return start


@pytest.fixture
def server(tmp_path: Path, store: str) -> Iterator[Server]:
    server = Server(tmp_path, store)
    server.start()
    yield server
    server.stop()
