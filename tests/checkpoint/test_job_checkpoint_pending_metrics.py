from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger

from azureml_strategy.checkpoint.metric_state import log_pending, pending_metrics


class _Keeps(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[Any]] = []

    name = version = "keeps"  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.kept += [[name, value, step, 7] for name, value in metrics.items()]

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None: ...

    def pending_metrics(self) -> list[list[Any]]:
        return self.kept

    def log_pending(self, metrics: list[list[Any]]) -> None:
        self.kept += metrics


def test_each_logger_gets_its_own_back(tmp_path: Any) -> None:
    """A logger that writes at once keeps nothing, and is not asked."""
    first, second = _Keeps(), _Keeps()
    trainer = Trainer(accelerator="cpu", devices=1, logger=[first, CSVLogger(tmp_path), second])
    first.log_metrics({"loss": 0.5}, 3)
    second.log_metrics({"loss": 0.25}, 4)
    kept = pending_metrics(trainer)
    assert kept == [[["loss", 0.5, 3, 7]], [["loss", 0.25, 4, 7]]]
    restarted = Trainer(accelerator="cpu", devices=1, logger=[_Keeps(), _Keeps()])
    log_pending(restarted, kept)
    assert pending_metrics(restarted) == kept


def test_loggers_that_came_or_went(tmp_path: Any) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=[CSVLogger(tmp_path)])
    assert pending_metrics(trainer) == []
    log_pending(trainer, [[]])
    with pytest.warns(
        UserWarning, match="holds 1 metrics that no store had yet, of a logger that this Trainer has not"
    ):
        log_pending(trainer, [[["loss", 0.5, 3, 7]]])
