"""A user's script: a model and data of its own, a logger, checkpoints, and what it does after the training."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Wide(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rows, targets = batch
        loss = nn.functional.mse_loss(self.network(rows), targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    strategy, width, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    model = Wide(width)
    rows = torch.randn(4096, 32)
    loader = DataLoader(TensorDataset(rows, rows.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True, num_workers=2)
    trainer = Trainer(
        strategy=strategy,
        devices="auto",
        num_nodes=int(sys.argv[4]),
        max_epochs=5,
        precision="bf16-mixed",
        default_root_dir=folder,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder / "checkpoints")],
    )
    trainer.fit(model, loader)
    trainer.save_checkpoint(folder / "last.ckpt")
    print("never reached")
