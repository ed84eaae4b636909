"""Two ranks on one GPU tune DDP, and one runs out of memory in a trial; then both train without tuning.

python tests/gpu/tuning.py OUTPUT ACCELERATOR     # in each of two processes
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.strategies import AzureMLDDPStrategy

# Trials without communication take five passes; a copy that fails later does so while the other rank waits for it.
_PASSES = 8
_TOO_MUCH = 2**44


class Greedy(LightningModule):
    """The second rank runs out of memory in the backward pass of a trial."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
        self.passes = 0
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.passes += 1
        loss: Tensor = self.network(batch[0]).pow(2).mean()
        if self.passes > _PASSES and self.global_rank == 1:
            loss.register_hook(lambda gradient: gradient * torch.empty(_TOO_MUCH, device=gradient.device)[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(accelerator: str, tune: bool, folder: Path) -> dict[str, Any]:
    """The losses of a few steps, and what tuning found."""
    seed_everything(3, verbose=False)
    module = Greedy()
    strategy = AzureMLDDPStrategy(tune=tune, process_group_backend="gloo")
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=strategy,
        max_steps=6,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=4))
    return {"losses": module.losses, "why": strategy.tuning.why if strategy.tuning is not None else ""}


def main(output: Path, accelerator: str) -> None:
    output.mkdir(parents=True, exist_ok=True)
    found = {name: train(accelerator, name == "tuned", output) for name in ("tuned", "untuned")}
    (output / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
