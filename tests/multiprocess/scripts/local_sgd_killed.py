"""A training of replicas, two of whose exchanges overlap, that goes on with what is in its folder.

Arguments: the folder, and the step in which rank 1 is killed, if any.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from tests.multiprocess.scripts.common import report
from tests.multiprocess.scripts.noisy import fit
from tests.multiprocess.scripts.replicas import values

from azureml_strategy.strategies import AzureMLLocalSGDStrategy

RANK, DIES_AT = int(os.environ["RANK"]), sys.argv[2:]


class Dies(Callback):
    """As a machine does."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if RANK == 1 and DIES_AT and trainer.global_step == int(DIES_AT[0]):
            os.kill(os.getpid(), signal.SIGKILL)


class Witness(Callback):
    """Where the training began, and what came out."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began = trainer.global_step

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.final = values(pl_module)


witness = Witness()
strategy = AzureMLLocalSGDStrategy(period=6, outer_learning_rate=0.7, compression="int8", fragments=2, delay=1)
checkpoint = {"asynchronous": False, "keep_last": 9}
trained = fit(Path(sys.argv[1]), Dies(), witness, strategy=strategy, checkpoint=checkpoint)
report(RANK, began=witness.began, final=witness.final, saved=trained["weights"])
