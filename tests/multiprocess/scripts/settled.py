"""Trains a module that may spread itself over two ranks and does not, and counts the process groups that remain."""

from __future__ import annotations

import os

import torch.distributed as dist
from common import Regression, loader, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from azureml_strategy.strategies import AzureMLModelParallelStrategy


class Late(Regression):
    """What `configure_model` makes is unknown when the mesh is made."""

    def configure_model(self) -> None:
        self.network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def sharded(self) -> bool:
        return hasattr(self.network[0].weight, "device_mesh")


class Counts(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Late)
        strategy = trainer.strategy
        assert isinstance(strategy, AzureMLModelParallelStrategy)
        groups = dist.distributed_c10d._world.pg_names
        mine = {dist.group.WORLD, *strategy.device_mesh.get_all_groups()}
        self.seen = {
            "sizes": [strategy.device_mesh[axis].size() for axis in ("data_parallel", "tensor_parallel")],
            "sharded": pl_module.sharded(),
            "unused": len([group for group in groups if group not in mine]),
        }


counts = Counts()
quiet_trainer(strategy=AzureMLModelParallelStrategy(), limit_train_batches=2, callbacks=[counts]).fit(Late(), loader())
report(int(os.environ["RANK"]), **counts.seen)
