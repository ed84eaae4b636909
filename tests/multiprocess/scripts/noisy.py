"""A small training that draws random numbers, accumulates, validates within its epochs and logs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.consolidate import checkpoint_format
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.resume import checkpoint_to_resume
from azureml_strategy.cluster import read_job
from azureml_strategy.data import ResumableLoader, ResumableSampler
from azureml_strategy.data.sampler import replica
from azureml_strategy.tracking import JobMLFlowLogger

SAMPLES, FEATURES, BATCH = 60, 6, 2
DURATIONS = "pipeline/"  # what the names of logged times begin with


class Numbers(LightningDataModule):
    """60 rows; the same global batches for any number of replicas."""

    def __init__(self, workers: int = 0, batch_size: int = BATCH) -> None:
        super().__init__()
        rows = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
        self.rows = TensorDataset(rows, rows.sum(dim=1, keepdim=True))
        self.workers = workers
        self.batch_size = batch_size

    def train_dataloader(self) -> ResumableLoader:
        sampler = ResumableSampler(self.rows, *replica(self.trainer), seed=3)
        return ResumableLoader(self.rows, sampler=sampler, batch_size=self.batch_size, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, batch_size=30)


class Tokens(Numbers):
    """60 sequences of 9 of 32 tokens, to be told after one another."""

    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__(batch_size=batch_size)
        tokens = torch.randint(32, (SAMPLES, 9), generator=torch.Generator().manual_seed(1))
        self.rows = TensorDataset(tokens[:, :-1], tokens[:, 1:].clone())

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, batch_size=10)


class Noisy(LightningModule):
    """Two layers with dropout between them: each step draws random numbers, others on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", nn.functional.mse_loss(self.network(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Curve(Logger):
    """Every value that is logged, by name and step, in a file that each attempt appends to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        return "curve"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self.path.open("a") as file:
            for name, value in metrics.items():
                file.write(json.dumps([name, step, float(value)]) + "\n")

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        pass


def curve(path: Path) -> dict[tuple[str, int], set[float]]:
    """What was logged of each name at each step but durations; a value that was repeated exactly is there once."""
    found: dict[tuple[str, int], set[float]] = {}
    for line in path.read_text().splitlines():
        name, step, value = json.loads(line)
        if not name.startswith(DURATIONS):
            found.setdefault((name, step), set()).add(value)
    return found


class StopAt(Callback):
    """Ends the process, or this fit, after so many batches of it."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


class Killed(BaseException):
    """In place of SIGKILL: nobody handles it."""


def fit(
    output: Path,
    *callbacks: Callback,
    module: LightningModule | None = None,
    data: LightningDataModule | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Train, or go on with the training that is in this folder; the final weights, those of the newest checkpoint."""
    checkpoint = {"monitor": "val/loss", "every_n_train_steps": 2, **arguments.pop("checkpoint", {})}
    data = data or Numbers(arguments.pop("workers", 0))
    seed_everything(5 + int(os.environ.get("RANK", "0")), verbose=False)
    module = Noisy() if module is None else module
    rank = int(os.environ.get("RANK", "0"))
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "val_check_interval": 8,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "logger": Curve(output / "curve.jsonl") if rank == 0 else False,
        **arguments,
    }
    output.mkdir(exist_ok=True)
    saver = JobCheckpoint(output / "checkpoints", "{epoch}-{step}", **checkpoint)
    trainer = Trainer(**settings, callbacks=[saver, *callbacks])
    chosen = checkpoint_to_resume("auto", output)
    job = read_job()
    for logger in trainer.loggers:
        if (chosen or (job and job.attempt)) and isinstance(logger, JobMLFlowLogger):
            logger.continue_run()
    trainer.fit(module, datamodule=data, ckpt_path=chosen)
    newest = CheckpointFolder(output / "checkpoints").complete()[0]
    saved = checkpoint_format(output / "checkpoints" / newest.name).read(output / "checkpoints" / newest.name)
    weights = [value for each in saved["state_dict"].values() for value in each.flatten().tolist()]
    return {
        "weights": weights,
        "step": trainer.global_step,
        "best": saver.best_model_path,
        "last": saver.last_model_path,
    }
