"""A training of a GPT that is slow enough to be measured, under any strategy, with one rank that is slowed down."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tests.multiprocess.scripts.common import quiet_trainer, report
from tests.multiprocess.scripts.strategies import OPTIONS, STRATEGIES
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.tracking import ThroughputCallback
from azureml_strategy.tracking.timing.meters import Part
from azureml_strategy.tracking.timing.steps import Step
from azureml_strategy.tracking.timing.summary import Totals


def busy(seconds: float) -> None:
    """Compute for a while: sleeping would count as waiting for others."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(_MATRIX, _MATRIX)


_MATRIX = torch.ones(64, 64)


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int, length: int, wait_s: float) -> None:
        self.samples, self.length, self.wait_s = samples, length, wait_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.wait_s)
        tokens = torch.randint(0, 32, (self.length + 1,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


class Slowed(LanguageModel):
    """Computes for longer in its forward pass, as a throttled GPU would."""

    extra_s = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        busy(self.extra_s)
        return super().training_step(batch, batch_idx)


class Steps(Callback):
    """Notes when steps end, by a clock of its own, and how long this rank's validation takes."""

    def __init__(self) -> None:
        self.started = self.ended = 0.0
        self.validation_s = 0.0

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self.started = self.started or time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.ended = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validation_s += time.perf_counter() - self._started


class Reduced(Callback):
    """The seconds of each step in which gradients were sent and nothing computed, as the reducer says."""

    def __init__(self) -> None:
        self.exposed_s: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.model._set_ddp_runtime_logging_sample_rate(1)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # The reducer tells of the step before.
        told = trainer.strategy.model._get_ddp_logging_data()
        exposed_ns = told.get("backward_comm_time", 0) - told.get("backward_compute_comm_overlap_time", 0)
        self.exposed_s.append(exposed_ns / 1e9)


class Kept(ThroughputCallback):
    """Keeps the communication and the length of each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.waits: list[tuple[float, float]] = []

    def _account(self, trainer: Trainer, steps: list[Step]) -> Totals:
        self.waits.extend((each.parts[Part.COMMUNICATION], each.seconds) for each in steps)
        return super()._account(trainer, steps)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main(
    strategy: str = "ddp",
    steps: int = 40,
    every: int = 5,
    width: int = 64,
    batch: int = 4,
    slow_rank: int = -1,
    compute_s: float = 0.0,
    data_s: float = 0.0,
    validate: bool = False,
    reducer: bool = False,
) -> None:
    rank = int(os.environ["RANK"])
    messages = Messages()
    logging.getLogger("azureml_strategy").addHandler(messages)
    network = GPTConfig(vocab_size=32, context=64, layers=4, width=width, heads=4, mlp_width=4 * width)
    is_slow = rank == slow_rank
    model = Slowed(network, learning_rate=1e-3, warmup_steps=4, seed=3)
    model.extra_s = compute_s if is_slow else 0.0
    throughput, clock = Kept(minimum_window=every, warmup_steps=0), Steps()
    reduced = Reduced()
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](),
        max_steps=steps,
        max_epochs=-1,
        log_every_n_steps=every,
        callbacks=[throughput, clock, *([reduced] if reducer else [])],
        limit_val_batches=4 if validate else 0,
        val_check_interval=steps // 2 if validate else 1.0,
        **OPTIONS.get(strategy, {}),
    )
    data = Tokens(10_000, 64, data_s / batch if is_slow else 0.0)
    loader = DataLoader(data, batch_size=batch)
    began = time.perf_counter()
    trainer.fit(model, loader, DataLoader(Tokens(64, 64, 0.0), batch_size=batch) if validate else None)
    summary, wall, slowest = throughput.summary(), throughput.wall_clock(), throughput.slowest_rank()
    assert summary is not None
    assert wall is not None
    report(
        trainer.global_rank,
        shares=summary.shares,
        step_s=summary.seconds / summary.steps,
        wall=wall.as_metrics(),
        trained_s=clock.ended - began,
        training_s=clock.ended - clock.started,
        validation_s=clock.validation_s,
        slowest=slowest.text if slowest else "",
        named=[text for text in messages.texts if "holds up the others" in text],
        reducer_s=reduced.exposed_s[1:],
        waits=throughput.waits,
    )


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
