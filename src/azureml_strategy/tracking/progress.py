"""A progress bar that shows samples per second, and prints plain lines if there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override

from azureml_strategy.tracking.timing.throughput import find_throughput


class ThroughputProgressBar(TQDMProgressBar):
    """Lightning's bar with the rate that the `ThroughputCallback` measures over all devices.

    The standard output of a job is a file, in which a bar that redraws itself becomes thousands of fragments. There,
    rank 0 prints whole lines instead: at most one every `line_interval_s`, and one at the end of each epoch.

    Args:
        refresh_rate: batches between two drawings of the bar; 0 turns off the bar and the lines.
        line_interval_s: seconds between two lines if standard output is no terminal.
    """

    def __init__(self, refresh_rate: int = 1, line_interval_s: float = 30.0) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._line_interval_s = line_interval_s
        self._next_line = 0.0
        self._prints_lines = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._throughput = find_throughput(trainer)
        self._prints_lines = self.is_enabled and not sys.stdout.isatty()
        if self._prints_lines:
            self.disable()

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        if self._throughput is not None and self._throughput.latest is not None:
            metrics[f"{self._throughput.unit}/s"] = f"{self._throughput.latest.samples_per_second:.1f}"
        return metrics

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._prints_lines and time.monotonic() >= self._next_line:
            self._print_line(trainer, batch_idx + 1, self.get_metrics(trainer, pl_module))

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self._prints_lines:
            # Once an epoch the line may wait for the GPU, so it has all logged values, with those of the last
            # validation. It has no learning rates: there is one for each parameter group, and they would fill the line.
            metrics = trainer.callback_metrics.items()
            logged = {name: float(value) for name, value in metrics if not name.startswith("lr-")}
            batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._print_line(trainer, batches, {**self.get_metrics(trainer, pl_module), **logged})

    def _print_line(self, trainer: Trainer, batches: int, metrics: dict[str, Any]) -> None:
        self._next_line = time.monotonic() + self._line_interval_s
        metrics.pop("v_num", None)  # the run's id, the same on every line
        shown = ", ".join(f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in metrics.items())
        where = f"Epoch {trainer.current_epoch}: batch {batches}/{self.total_train_batches}"
        print(f"{where}, {shown}" if shown else where, flush=True)
