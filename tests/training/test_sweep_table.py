"""The table at the end of a sweep on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig

from azureml_strategy.training import run as running
from azureml_strategy.training.app import run_recipe
from azureml_strategy.training.recipes import RecipeError


@pytest.fixture(autouse=True)
def _trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A training that succeeds with some seeds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["azureml-strategy"])

    def train(config: DictConfig, command: str) -> dict[str, float]:
        if config.seed == 2:
            raise RuntimeError("CUDA out of memory.\nA second line")
        if config.seed == 3:
            raise RecipeError("no such thing")
        return {"train/loss": 1.0, "val/top1": config.seed / 10} if config.seed == 1 else {"train/loss": 0.25}

    monkeypatch.setattr(running, "train", train)


def table(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("| ")]


def test_each_run_has_its_overrides_its_result_and_its_state(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_recipe("resnet50_synthetic", ["-m", "seed=1,2,4", "checkpoint.monitor=val/top1", "checkpoint=best"])
    heading, *rows = table(capsys.readouterr().out)
    assert heading == ["run", "overrides", "val/top1", "train/loss", "state"]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert [row[2:] for row in rows] == [
        ["0.1", "", "done"],
        ["", "", "RuntimeError: CUDA out of memory."],
        ["", "0.25", "done"],
    ]
    assert "seed=2" in rows[1][1]


def test_what_ended_the_sweep_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match="no such thing"):
        run_recipe("resnet50_synthetic", ["-m", "seed=4,3,1"])
    _, *rows = table(capsys.readouterr().out)
    assert [row[-1] for row in rows] == ["done", "RecipeError: no such thing"]


def test_a_single_run_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe("resnet50_synthetic", ["seed=4"])
    assert table(capsys.readouterr().out) == []
