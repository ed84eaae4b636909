"""A training on packed images that writes down, rank by rank, which pixels and label each sample of a step had."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from tests.multiprocess.scripts.common import report
from torch import Tensor

from azureml_strategy.checkpoint import ElasticRestart, JobCheckpoint, checkpoint_to_resume
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.data import ImageFolderDataModule
from azureml_strategy.strategies import AzureMLDDPStrategy

GLOBAL_BATCH = 8


class Recorded(LightningModule):
    """Notes each sample before the step that learns from it; a step that is repeated is noted again."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.path = path

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.note(batch, f"train {self.global_step}")
        return self.weight * batch[0].float().mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.note(batch, f"val {self.current_epoch} {batch_idx}")

    def note(self, batch: tuple[Tensor, Tensor], place: str) -> None:
        images, labels = batch
        assert images.is_contiguous(memory_format=torch.channels_last)
        samples = [
            [hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()[:12], int(label)]
            for image, label in zip(images, labels, strict=True)
        ]
        with self.path.open("a") as file:
            file.write(json.dumps([place, samples]) + "\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class DieAt(Callback):
    """Every rank is gone before this optimizer step begins, and not before there is a checkpoint."""

    def __init__(self, step: int | None, folder: Path) -> None:
        self.step, self.folder = step, CheckpointFolder(folder)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            while not self.folder.complete():  # one may be under way in the background
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


output, options = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
output.mkdir(parents=True, exist_ok=True)
seed_everything(11)
checkpoint = checkpoint_to_resume("auto", output)
trainer = Trainer(
    accelerator="cpu",
    strategy=AzureMLDDPStrategy(),
    callbacks=[
        JobCheckpoint(output / "checkpoints", every_n_train_steps=2),
        ElasticRestart(checkpoint),
        DieAt(options.pop("die_at", None), output / "checkpoints"),
    ],
    max_epochs=2,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
    use_distributed_sampler=False,
)
module = Recorded(output / f"samples.{options.pop('attempt')}.{rank}.jsonl")
data = ImageFolderDataModule(image_size=8, batch_size=GLOBAL_BATCH // ranks, **options)
trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
report(trainer.global_rank, ranks=ranks)
