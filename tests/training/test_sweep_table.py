"""The table at the end of a sweep shows what each run changed, without secrets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from azureml_strategy.training import app


def test_a_secret_among_the_overrides_does_not_reach_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = SimpleNamespace(task=OmegaConf.create(["seed=1", "data.token=abcdef1234567"]))
    running = SimpleNamespace(get=lambda: SimpleNamespace(mode=RunMode.MULTIRUN, overrides=overrides))
    monkeypatch.setattr(app, "HydraConfig", running)
    runs: list[app.SweepRun] = []
    with app._noted(OmegaConf.create({}), runs) as metrics:
        metrics["val/loss"] = 0.5
    assert (runs[0].value, runs[0].state) == (0.5, "done")
    assert "seed=1" in runs[0].overrides
    assert "abcdef" not in runs[0].overrides
