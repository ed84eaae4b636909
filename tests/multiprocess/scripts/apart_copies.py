"""Trainings in which one rank changes something that others have too: what is said, for one strategy."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from tests.multiprocess.scripts.common import FEATURES, loader, quiet_trainer, report
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLLocalSGDStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)

LAST = int(os.environ["WORLD_SIZE"]) - 1
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": AzureMLDDPStrategy,
    "stock ddp": partial(DDPStrategy, broadcast_buffers=False),
    "zero 1": partial(AzureMLDeepSpeedStrategy, stage=1),
    "zero 2": partial(AzureMLDeepSpeedStrategy, stage=2),
    "zero 3": partial(AzureMLDeepSpeedStrategy, stage=3),
    "fsdp2": partial(AzureMLModelParallelStrategy, tensor_parallel_size=1),
    "tensor parallel": partial(AzureMLModelParallelStrategy, data_parallel_size=1, tensor_parallel_size=LAST + 1),
    "pipeline": partial(PipelineStrategy, num_stages=1, micro_batches=2),
    "local sgd": partial(AzureMLLocalSGDStrategy, period=2),
}


class Network(LightningModule):
    """Layers with statistics that a step changes, and a table that it does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, 1)
        self.norm = nn.BatchNorm1d(16, affine=False)
        self.register_buffer("table", torch.ones(16))

    def sharded_blocks(self) -> list[nn.Module]:
        return [self.first]

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"first": "colwise", "second": "rowwise"} if "tensor" in sys.argv[1] else {}

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(rows)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.norm(torch.randn(8, 16))
        return (self(batch[0]).squeeze(1) - batch[0].sum(1)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        trained = [*self.first.parameters(), *self.second.parameters()]
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@dataclass
class Layer:
    """A layer of `Staged`."""

    name: str
    layer: nn.Module
    kind, tied, tied_parameter = "layer", None, "weight"

    def build(self) -> nn.Module:
        return self.layer


class Staged(Network):
    """The same in stages, without buffers."""

    def __init__(self) -> None:
        super().__init__()
        del self.norm, self.table

    def pipeline_layers(self) -> list[Any]:
        return [Layer("first", self.first), Layer("second", self.second)]

    def pipeline_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[0].sum(1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rows, sums = self.pipeline_batch(batch)
        return (self(rows).squeeze(1) - sums).pow(2).mean()


class OnOneRank(Callback):
    """Changes something on the last rank alone, before its third batch."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank == LAST:
            _change(self.what, trainer, module)


@torch.no_grad()
def _change(what: str, trainer: Trainer, module: Any) -> None:
    if what == "learning rate":
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
    elif what == "scheduler":
        trainer.lr_scheduler_configs[0].scheduler.last_epoch += 7  # type: ignore[union-attr]
    elif what == "parameter":
        for each in module.parameters():
            own = each.to_local() if isinstance(each, DTensor) else each.data
            own.add_(1e-3)
    elif what == "buffer":
        for each in module.buffers():
            each.add_(1)


def main() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("azureml_strategy").addHandler(handler)
    found: dict[str, list[str]] = {}
    rank = 0
    for what in ("nothing", "parameter", "buffer", "learning rate", "scheduler"):
        module = Staged() if sys.argv[1] == "pipeline" else Network()
        trainer = quiet_trainer(
            strategy=STRATEGIES[sys.argv[1]](), callbacks=[OnOneRank(what)], max_steps=6, max_epochs=2, devices=LAST + 1
        )
        trainer.fit(module, loader(4))
        rank, found[what], lines[:] = trainer.global_rank, lines[:], []
    report(rank, **{name: [each for each in said if "REPLICA_CHECK" in each] for name, said in found.items()})


if __name__ == "__main__":
    main()
