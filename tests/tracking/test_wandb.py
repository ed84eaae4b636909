from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from azureml_strategy.tracking import JobWandbLogger, TrackingError

wandb = pytest.importorskip("wandb", reason="the extra `wandb` is not installed")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # without a .netrc
    yield
    wandb.teardown()


def test_a_run_of_its_own_after_close_and_no_secret(
    model: Any, data: Any, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    ids = set()
    for name in (None, "mine"):
        logger = JobWandbLogger("p", name, save_dir=str(tmp_path), offline=True)
        logger.suggest("suggested", {"azureml_strategy.recipe": "r"})
        logger.log_hyperparams({"api_key": "abcdefgh-1", "lr": 0.1})
        assert logger.experiment.name == (name or "suggested")
        assert logger.experiment.config["api_key"] == "<redacted>"
        assert logger.experiment.config["azureml_strategy.recipe"] == "r"
        make_trainer(logger=logger).fit(model, data)
        ids.add(logger.experiment.id)
        logger.close()
    assert len(ids) == 2
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2
    assert "WANDB_MODE" not in os.environ
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [each for each in written if b"abcdefgh-1" in each]


def test_a_restarted_job_goes_on_with_its_id(tmp_path: Path) -> None:
    for _ in range(2):
        logger = JobWandbLogger("p", id="bold_sky_12", save_dir=str(tmp_path), offline=True)
        logger.log_hyperparams({"lr": 0.1})
        assert logger.version == "bold_sky_12"
        logger.close()


def test_no_key_is_one_sentence(tmp_path: Path) -> None:
    logger = JobWandbLogger("p", save_dir=str(tmp_path))
    with pytest.raises(TrackingError, match=r"wandb does not start the run: .*offline=true"):
        logger.log_hyperparams({"lr": 0.1})


def test_no_upload_without_a_network(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="offline=true cannot"):
        JobWandbLogger("p", save_dir=str(tmp_path), offline=True, log_model=True)
