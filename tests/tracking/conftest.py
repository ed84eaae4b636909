"""Stores, loggers and a model for the tests of tracking."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from mlflow.tracking import MlflowClient
from tests.preloaded import Forked
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


class Server:
    """A real `mlflow server` on the loopback interface, which can be stopped and started again."""

    def __init__(self, folder: Path, store: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder, self._store = folder, store

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(self.port)]
        command += ["--backend-store-uri", self._store, "--default-artifact-root", str(self._folder / "artifacts")]
        with (self._folder / "server.log").open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while not self._is_up():
            assert self._process.poll() is None, (self._folder / "server.log").read_text()

    def stop(self) -> None:
        processes = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes[1:], timeout=10)
        self._process.wait()

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False


@pytest.fixture
def server(tmp_path: Path, store: str) -> Iterator[Server]:
    server = Server(tmp_path, store)
    server.start()
    yield server
    server.stop()
