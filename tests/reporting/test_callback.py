"""A run leaves its page, whether it ends, crashes or is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from mlflow import MlflowClient

from azureml_strategy.reporting import RunPage
from azureml_strategy.tracking import JobMLFlowLogger


class Raises(Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 3:
            if isinstance(self.error, ProcessLookupError):
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise self.error


class Logs(BoringModel):
    def training_step(self, batch: object, batch_idx: int) -> object:
        step = super().training_step(batch, batch_idx)
        self.log("train_loss", step["loss"])
        return step


def fit(store: str, folder: Path, *callbacks: Callback, steps: int = 5) -> None:
    Trainer(
        logger=JobMLFlowLogger(tracking_uri=store),
        callbacks=[*callbacks, RunPage()],
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        limit_val_batches=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
    ).fit(Logs())


@pytest.fixture(autouse=True)
def page_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZUREML_STRATEGY_PAGE")


def artifact(client: MlflowClient) -> str:
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return Path(client.download_artifacts(run.info.run_id, "report.html")).read_text()


def test_at_the_end(client: MlflowClient, store: str, tmp_path: Path) -> None:
    fit(store, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert artifact(client) == text
    assert ">finished<" in text
    assert 'aria-label="train_loss"' in text
    place = json.loads((tmp_path / "run.json").read_text())
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert place["run_id"] == run.info.run_id
    assert "lightning" in run.data.tags["azureml_strategy.versions"]


def test_after_an_exception_it_says_where_and_what_without_secrets(
    client: MlflowClient, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "opaque-token-0815")
    with pytest.raises(ValueError, match="the 4th"):
        fit(store, tmp_path, Raises(ValueError("the 4th batch is <bad> opaque-token-0815")))
    text = artifact(client)
    assert ">failed<" in text
    assert "An exception ended this run at step 3" in text
    assert "ValueError: the 4th batch is &lt;bad&gt;" in text
    assert "opaque-token" not in text


def test_sigterm_leaves_one_too(client: MlflowClient, store: str, tmp_path: Path) -> None:
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    with pytest.raises(SIGTERMException):
        fit(store, tmp_path, Raises(ProcessLookupError()))
    assert "SIGTERM ended the run" in artifact(client)


def test_a_page_that_cannot_be_made_is_a_warning(
    client: MlflowClient, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    fit(store, tmp_path)
    assert "The run goes on without it" in caplog.text
    assert "AZUREML_STRATEGY_PAGE=off" in caplog.text
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_takes_too_long_is_given_up(
    client: MlflowClient, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("azureml_strategy.tracking.run_page._LONGEST_S", 0.05)
    fit(store, tmp_path)
    assert subprocess.TimeoutExpired.__name__ in caplog.text


def test_without_the_extra_one_sentence_says_what_to_install(
    client: MlflowClient, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("azureml_strategy.tracking.run_page.find_spec", lambda name: None)
    fit(store, tmp_path)
    assert "pip install -c constraints.txt '.[report]'" in caplog.text


def test_the_switch_turns_it_off(
    client: MlflowClient, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZUREML_STRATEGY_PAGE", "off")
    fit(store, tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "run.json").exists()


def test_the_page_is_made_without_torch() -> None:
    """At SIGTERM there are eight seconds for it, and `import torch` takes that long where the disk is slow."""
    code = "import sys, azureml_strategy.cli.report, azureml_strategy.reporting.run_page; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
