from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Trainer

from azureml_strategy.tracking import ThroughputCallback, ThroughputProgressBar


def fit(make_trainer: Callable[..., Trainer], model: Any, data: Any, bar: ThroughputProgressBar) -> None:
    callbacks = [ThroughputCallback(warmup_steps=0, unit="images"), bar]
    make_trainer(callbacks=callbacks, enable_progress_bar=True, log_every_n_steps=5, max_epochs=2).fit(model, data)


def test_a_log_file_gets_a_line_an_epoch(
    make_trainer: Callable[..., Trainer], model: Any, data: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(make_trainer, model, data, ThroughputProgressBar(line_interval_s=3600))
    output = capsys.readouterr().out
    assert "\r" not in output
    lines = [line for line in output.splitlines() if line.startswith("Epoch")]
    assert [line.split(",")[0] for line in lines] == [
        "Epoch 0: batch 1/20",
        "Epoch 0: batch 20/20",
        "Epoch 1: batch 20/20",
    ]
    assert "images/s " in lines[1]


def test_a_terminal_gets_the_bar(
    make_trainer: Callable[..., Trainer],
    model: Any,
    data: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    fit(make_trainer, model, data, ThroughputProgressBar())
    output = capsys.readouterr().out
    assert "\r" in output
    assert "images/s=" in output


def test_refresh_rate_zero_is_silent(
    make_trainer: Callable[..., Trainer], model: Any, data: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(make_trainer, model, data, ThroughputProgressBar(refresh_rate=0))
    assert "Epoch" not in capsys.readouterr().out
