from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger

from azureml_strategy.checkpoint.job_checkpoint import log_again, unwritten


class _Keeps(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[Any]] = []

    name = version = "keeps"  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.kept += [[name, value, step, 7] for name, value in metrics.items()]

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None: ...

    def unwritten(self) -> list[list[Any]]:
        return self.kept

    def log_again(self, metrics: list[list[Any]]) -> None:
        self.kept += metrics


def test_each_logger_gets_its_own_back(tmp_path: Any) -> None:
    """A logger that writes at once keeps nothing, and is not asked."""
    first, second = _Keeps(), _Keeps()
    trainer = Trainer(accelerator="cpu", devices=1, logger=[first, CSVLogger(tmp_path), second])
    first.log_metrics({"loss": 0.5}, 3)
    second.log_metrics({"loss": 0.25}, 4)
    kept = unwritten(trainer)
    assert kept == [[["loss", 0.5, 3, 7]], [["loss", 0.25, 4, 7]]]
    restarted = Trainer(accelerator="cpu", devices=1, logger=[_Keeps(), _Keeps()])
    log_again(restarted, kept)
    assert unwritten(restarted) == kept


def test_loggers_that_came_or_went(tmp_path: Any) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=[CSVLogger(tmp_path)])
    assert unwritten(trainer) == []
    log_again(trainer, [[["loss", 0.5, 3, 7]]])
