"""Trains by DDP with `ProfileSteps`, and is asked for a profile, or profiles itself, while it trains."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.lightning_internals import logged_step
from azureml_strategy.profiling import ProfileSteps
from azureml_strategy.profiling.request import ANSWER, REQUEST
from azureml_strategy.tracking import JobMLFlowLogger

WIDTH, DEPTH = 512, 6
# More than any case needs: a training that is asked for a profile ends when it has the answer.
MOST_STEPS = 2000


class Wide(LightningModule):
    """Layers whose gradients take some time to compute, and some to send."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
        self.network = nn.Sequential(*layers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Reducer(Callback):
    """What DDP itself measures of each step: seconds of communication that no computation overlaps."""

    def __init__(self) -> None:
        self.exposed: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.model._set_ddp_runtime_logging_sample_rate(1)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        figures = trainer.strategy.model._get_ddp_logging_data()
        apart = figures.get("backward_comm_time", 0) - figures.get("backward_compute_comm_overlap_time", 0)
        self.exposed.append(apart / 1e9)


class Asks(Callback):
    """At a step, asks for a profile on one rank; ends the training when there is the answer, on all ranks alike."""

    def __init__(self, text: str | None, rank: int) -> None:
        self.text, self.rank = text, rank

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step = logged_step(trainer)
        if step == 3 and trainer.global_rank == self.rank:
            if self.text is None:
                os.kill(os.getpid(), signal.SIGUSR1)
            else:
                Path(REQUEST).write_text(self.text)
        time.sleep(0.01)
        done = Path(ANSWER).exists() if self.text is not None else any(Path("profile").glob("summary_rank_1.json"))
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(done, all=False)


class OwnProfiler(Callback):
    """The user's, on rank 1, over steps 4 to 9."""

    def __init__(self) -> None:
        self.profile: Any = None
        self.names: set[str] = set()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and logged_step(trainer) == 3:
            self.profile = profile(activities=[ProfilerActivity.CPU])
            self.profile.start()
        if trainer.global_rank == 1 and logged_step(trainer) == 9:
            self.profile.stop()
            self.names = {each.key for each in self.profile.key_averages()}


def main(case: str, argument: str) -> None:
    reducer, own = Reducer(), OwnProfiler()
    on_request = ProfileSteps(folder=".", signal="SIGUSR1")
    callbacks: list[Callback]
    if case == "steps":
        callbacks = [reducer, ProfileSteps(argument, ranks="0,1", folder=".")]
    elif case == "busy":
        callbacks = [own, ProfileSteps(argument, ranks=[0, 1], folder=".")]
    else:
        callbacks = [on_request, Asks(argument or None, rank=0 if argument else 1)]
    steps = MOST_STEPS if case == "request" else 12
    rows = torch.randn(2 * 32 * steps, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(
        strategy="azureml_ddp",
        callbacks=callbacks,
        logger=JobMLFlowLogger(flush_interval_s=0.1),
        default_root_dir=os.getcwd(),
    )
    trainer.fit(Wide(), DataLoader(TensorDataset(rows), batch_size=32))
    steps = logged_step(trainer)
    report(trainer.global_rank, steps=steps, exposed=reducer.exposed, own=sorted(own.names))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
