"""A `fit` whose node is about to be taken away, under any strategy; what happens then is the test's to play.

Files tell the test how far it is: `training`, from the fourth batch of rank 0 on, and `pid.RANK`.
With `"threaded": true` the `fit` runs off the main thread; with `"twice": true` one that is told nothing comes first.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.checkpoint.job_checkpoint import JobCheckpoint
from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.preemption.termination import TerminateTogether

STEPS = 80
TOKENS, LENGTH = 64, 16
FOLDER = Path(os.environ["RESULTS"]).parent
RANK = int(os.environ.get("RANK", "0"))


class Story(Callback):
    """Trains slowly enough for somebody to intervene, and records losses and how the fit ends."""

    def __init__(self, undisturbed: list[float]) -> None:
        self.undisturbed = undisturbed
        self.losses: list[float] = []
        self.longest = 0.0
        self.last = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (FOLDER / f"pid.{trainer.global_rank}").write_text(str(os.getpid()))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        self.longest, self.last = max(self.longest, now - self.last), now
        time.sleep(0.01)
        if trainer.global_step == 3 and trainer.is_global_zero:
            (FOLDER / "training").touch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._report(trainer, exception)

    def _report(self, trainer: Trainer, exception: BaseException | None) -> None:
        code = getattr(exception, "code", 0)
        told = {"losses": self.losses, "undisturbed": self.undisturbed, "longest": self.longest}
        report(trainer.global_rank, step=trainer.global_step, code=code, **told)


def strategy(name: str) -> Strategy | str:
    if name == "pipeline":
        from azureml_strategy.strategies import PipelineStrategy

        return PipelineStrategy(num_stages=2, micro_batches=2)
    if name == "model_parallel":
        from azureml_strategy.strategies import AzureMLModelParallelStrategy

        return AzureMLModelParallelStrategy()
    return f"azureml_{name}"


def main(
    name: str,
    devices: int = 1,
    accumulate: int = 1,
    saver: str = "lightning",
    validated: bool = False,
    short: bool = False,
    undisturbed: list[float] | None = None,
    watched: bool = True,
) -> list[float]:
    """Train under a strategy, and return the losses; `short`: each batch is an epoch; `validated`: after each epoch."""
    network = GPTConfig(TOKENS, LENGTH, 2, 32, heads=4, mlp_width=64)
    module = LanguageModel(network, learning_rate=5e-3, warmup_steps=4, seed=3)
    tokens = torch.randint(TOKENS, (8 * STEPS * 2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batches = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:].clone()), batch_size=4)
    # Only the last rank's node is told, as on Azure.
    events = None if watched and int(os.environ.get("WORLD_SIZE", "1")) - 1 == RANK else "off"
    savers = {
        "lightning": lambda: ModelCheckpoint(FOLDER / "saved", "{step}", save_on_exception=True, every_n_epochs=10**6),
        "job": lambda: JobCheckpoint(FOLDER / "saved", "{step}", every_n_epochs=10**6),
    }
    limits = {"limit_train_batches": 1} if short else {}
    noted = Story(undisturbed or [])
    trainer = quiet_trainer(
        strategy=strategy(name),
        devices=devices,
        max_epochs=STEPS,
        max_steps=STEPS,
        callbacks=[noted, TerminateTogether(events, poll_s=0.05, agree_s=0.05), savers[saver]()],
        enable_checkpointing=True,
        accumulate_grad_batches=accumulate,
        limit_val_batches=int(validated),
        **limits,
    )
    trainer.fit(module, batches, batches)
    return noted.losses


def undisturbed(**story: Any) -> list[float]:
    """The losses of a training that is told nothing, of which no file is left."""
    losses = main(sys.argv[1], watched=False, **story)
    dist.barrier()
    if RANK == 0:
        (FOLDER / "training").unlink()
        shutil.rmtree(FOLDER / "saved")  # the checkpoint of its end
    dist.barrier()
    return losses


story = json.loads(sys.argv[2])
if story.pop("twice", False):
    story["undisturbed"] = undisturbed(**story)
if story.pop("threaded", False):
    thread = threading.Thread(target=main, args=(sys.argv[1],), kwargs=story)
    thread.start()
    thread.join()
else:
    main(sys.argv[1], **story)
