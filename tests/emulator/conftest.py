"""An MLflow store that need not be made anew for each job, and jobs emulated in this process."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from azureml_strategy.emulator import EmulatedJob, emulate


@pytest.fixture(scope="session")
def _empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "empty.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()  # MLflow makes the tables, which takes seconds
    return path


@pytest.fixture
def store(_empty_store: Path, tmp_path: Path) -> MlflowClient:
    """The store that an emulated job finds in its folder."""
    shutil.copy(_empty_store, tmp_path / "mlflow.db")
    return MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")


@dataclass(frozen=True)
class Emulated:
    """What became of a job: its exit code, its output, and the status of its MLflow run."""

    exit_code: int
    output: str
    status: str

    def of_rank(self, rank: int) -> list[str]:
        start = f"[rank {rank}, node "
        return [line.partition("] ")[2] for line in self.output.splitlines() if line.startswith(start)]

    def json(self) -> list[Any]:
        """What each rank printed last, by rank."""
        ranks = range(self.output.count("] {"))
        return [json.loads(self.of_rank(rank)[-1]) for rank in ranks]


RunCode = Callable[..., Emulated]


@pytest.fixture
def run_code(store: MlflowClient, capsys: pytest.CaptureFixture[str]) -> RunCode:
    """Emulate a job whose processes run a piece of Python."""

    def run(code: str, **job: Any) -> Emulated:
        capsys.readouterr()
        exit_code = emulate(EmulatedJob([sys.executable, "-c", code], **job))
        output = capsys.readouterr().out
        (run,) = store.search_runs([experiment.experiment_id for experiment in store.search_experiments()])
        assert run.info.run_id in output.splitlines()[0]
        store.delete_run(run.info.run_id)
        return Emulated(exit_code, output, run.info.status)

    return run


def soon(action: Callable[[], object], when: Callable[[], bool]) -> threading.Thread:
    """Act from another thread as soon as something has happened, within some minutes."""

    def wait() -> None:
        pause = threading.Event()
        for _ in range(4000):
            if when():
                action()
                return
            pause.wait(0.05)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
