"""A small training on two ranks: a release writes a checkpoint of it for later ones, and a test goes on from there.

Arguments: `write` or `resume`, the strategy, the folder that gets or has `checkpoints`. With `write` it becomes an
archive of the same name, with what the ranks of the undisturbed training saw, `0.json` and `1.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from tests.multiprocess.scripts.noisy import Tokens
from tests.multiprocess.scripts.strategies import OPTIONS, STRATEGIES
from torch import Tensor

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.manifest import manifest_path
from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.strategies import AzureMLLocalSGDStrategy

# The step whose checkpoint is kept, within the first of two epochs.
KEPT = 6
RANK = int(os.environ["RANK"])


class Dropped(LanguageModel):
    """Some of the states are dropped, so that random numbers count."""

    def __init__(self, pipeline: bool) -> None:
        network = GPTConfig(vocab_size=32, context=8, layers=2, width=8, heads=2, mlp_width=16)
        super().__init__(network, learning_rate=5e-3, warmup_steps=4, seed=3)
        self.dropped = not pipeline

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if self.dropped:
            kept = torch.rand(batch[0].shape) > 0.1
            batch = (torch.where(kept, batch[0], 0), batch[1])
        return super().training_step(batch, batch_idx)


class Witness(Callback):
    """Notes the loss of each step, and what this rank has before the step after the checkpoint, and at the end."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"losses": {}}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == KEPT and "weights" not in self.seen:
            self.seen |= {"weights": weights(pl_module), "moments": moments(trainer), "epoch": trainer.current_epoch}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.seen["losses"].setdefault(str(trainer.global_step), []).append(float(outputs["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen |= {"end": weights(pl_module), "step": trainer.global_step}


def weights(module: LightningModule) -> list[float]:
    """Sums over this rank's part of each parameter."""
    return [total(each) for each in module.parameters()]


def moments(trainer: Trainer) -> list[float]:
    """Sums over this rank's states of the optimizer."""
    states = trainer.optimizers[0].state.values()
    return [total(value) for state in states for value in state.values() if isinstance(value, Tensor)]


def total(value: Tensor) -> float:
    own = value.to_local() if hasattr(value, "to_local") else value
    weighted = own.detach().double().flatten() * torch.arange(1, own.numel() + 1)  # so that their order counts
    return float(weighted.sum())


def pack(folder: Path) -> None:
    """Make an archive of the one checkpoint and of what was seen, instead of the folder."""
    for each in CheckpointFolder(folder / "checkpoints").complete():
        if each.step != KEPT:
            path = folder / "checkpoints" / each.name
            manifest_path(path).unlink()
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with tarfile.open(folder.with_name(f"{folder.name}.tar.xz"), "w:xz") as archive:
        archive.add(folder, ".")
    shutil.rmtree(folder)


def main(verb: str, name: str, folder: Path) -> None:
    strategies = STRATEGIES | {"local_sgd": lambda: AzureMLLocalSGDStrategy(period=4, outer_learning_rate=0.7)}
    seed_everything(5 + RANK, verbose=False)
    pipeline = name == "pipeline"
    witness = Witness()
    resume = "never" if verb == "write" else "auto"
    saver = JobCheckpoint(folder / "checkpoints", every_n_train_steps=KEPT, save_top_k=-1, keep_last=9, resume=resume)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategies[name](),
        **({"accumulate_grad_batches": 2} | OPTIONS.get(name, {})),
        max_epochs=2,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[saver, witness],
    )
    trainer.fit(Dropped(pipeline), datamodule=Tokens(4 if pipeline else 2))
    out = folder if verb == "write" else Path(os.environ["RESULTS"])
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{RANK}.json").write_text(json.dumps(witness.seen))
    torch.distributed.barrier()
    if verb == "write" and RANK == 0:
        pack(folder)


main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve())
