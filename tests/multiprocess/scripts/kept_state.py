"""What a training and its callbacks keep from step to step: without a break, and with one.

Arguments: cases, keys of `CASES`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from tests.multiprocess.scripts.common import report
from tests.multiprocess.scripts.noisy import Killed, StopAt
from tests.situations.modules import Regression, loader
from tests.situations.optimization import Manual, ManualTwice
from tests.situations.running import LAYOUTS, RANK, prepare, process_group, replica, weights
from torch import Tensor

from azureml_strategy.checkpoint import JobCheckpoint, checkpoint_to_resume

FOLDER = Path(os.environ["RESULTS"]).parent


class Adam:
    """The optimizer of a module, and its validation."""

    def optimizer(self, parameters: Any, rate: float = 0.05) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=rate)

    def validation_step(self: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(self(batch[0]), batch[0]), sync_dist=True)


class Automatic(Adam, Regression):
    pass


class ByHand(Adam, Manual):
    pass


class ByHandTwice(Adam, ManualTwice):
    pass


class Noise(Callback):
    """A user's: it keeps numbers of its own on each rank, and adds noise to each batch.

    Args:
        stream: which noise; the same on ranks that read the same batches.
    """

    def __init__(self, stream: int) -> None:
        self.generator = torch.Generator().manual_seed(stream)
        self.batches = 0
        self.by_rank: list[int] = []
        self.drawn = 0.0
        self.mean = torch.zeros(3)
        self.began_at: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began_at = trainer.global_step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: list[Tensor], batch_idx: int
    ) -> None:
        self.batches += 1
        self.by_rank.append(self.batches * (RANK + 1))
        self.drawn = float(torch.rand(1))
        batch[0] += 0.1 / self.batches * torch.randn(batch[0].shape, generator=self.generator)
        self.mean += batch[0][0, :3] / self.batches

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "by_rank": self.by_rank, "drawn": self.drawn, "mean": self.mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)


class Data(LightningDataModule):
    """It counts what this rank was given, each rank in another way.

    Args:
        replica: which of how many share the rows.
    """

    def __init__(self, *replica: int) -> None:
        super().__init__()
        self.replica, self.given = replica, 0

    def train_dataloader(self) -> Any:
        return loader(*self.replica)

    val_dataloader = train_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.given += RANK + 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.given = state_dict["given"]


@dataclass(frozen=True)
class Case:
    """A training that is broken off.

    Attributes:
        layout: how it is laid out.
        module: makes its module.
        trainer: arguments of the Trainer, made anew for each training.
    """

    layout: str
    module: Callable[[], LightningModule] = Automatic
    trainer: Callable[[], dict[str, Any]] = dict


def scaling() -> dict[str, Any]:
    """Float16 with a loss scale that grows after so many steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


CASES = {
    **{layout: Case(layout) for layout in LAYOUTS},
    **{f"{layout}, by hand": Case(layout, ByHand) for layout in ("ddp", "zero_2", "zero_3", "fsdp2")},
    "ddp, by hand twice": Case("ddp", ByHandTwice),
    "ddp, loss scale": Case("ddp", trainer=scaling),
    "zero_1, bf16": Case("zero_1", trainer=partial(dict, precision="bf16-mixed")),
}


def train(case: Case, folder: Path, *callbacks: Callback) -> dict[str, Any]:
    """Train, or go on with the training that is in this folder; what it ends with."""
    torch.manual_seed(5 + RANK)
    data, module, noise = Data(*replica(case.layout)), case.module(), Noise(replica(case.layout)[0])
    best = ModelCheckpoint(folder / "best", "{step}", monitor="val", save_top_k=2, save_last=True)
    saver = JobCheckpoint(folder / "checkpoints", "{step}", monitor="val", save_top_k=2, every_n_train_steps=2)
    trainer = Trainer(
        strategy=LAYOUTS[case.layout](**process_group()),
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_epochs=3,
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[noise, best, saver, *callbacks],
        **case.trainer(),
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint_to_resume("auto", folder))
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "weights": weights(case.layout, module),
        "noise": {**noise.state_dict(), "mean": noise.mean.tolist()},
        "given": data.given,
        "best": _names(best),
        "job": _names(saver),
        "steps": trainer.global_step,
        "loops": trainer.fit_loop.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "began at": noise.began_at,
        "next": torch.rand(1).item(),
    }


def _names(saver: ModelCheckpoint) -> dict[str, Any]:
    """What a saver knows of its checkpoints, without the folder."""
    return {
        "scores": {Path(path).name: float(score) for path, score in saver.best_k_models.items()},
        "best": Path(saver.best_model_path).name,
        "score": None if saver.best_model_score is None else float(saver.best_model_score),
        "last": Path(saver.last_model_path).name,
        "worst": Path(saver.kth_best_model_path).name,
    }


def both(name: str) -> dict[str, Any]:
    case, folder = CASES[name], FOLDER / name.replace(", ", "_").replace(" ", "_")
    whole = train(case, folder / "whole")
    with suppress(Killed):
        train(case, folder / "broken", StopAt(5))
    gc.collect()
    return {"whole": whole, "resumed": train(case, folder / "broken")}


if __name__ == "__main__":
    prepare()
    report(RANK, **{name: both(name) for name in sys.argv[1].split(";")})
