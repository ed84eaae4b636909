"""Fits whose processes Lightning starts by `multiprocessing`, one strategy after the other; `num_nodes=` comes last."""

from __future__ import annotations

import sys
from typing import Any

from common import Regression, loader, parameters, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer


class Record(Callback):
    """Writes down what each rank has done, from within its process."""

    def __init__(self, place: int) -> None:
        self.place = place

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        assert isinstance(pl_module, LightningModule)
        report(
            10 * self.place + trainer.global_rank,
            world_size=trainer.world_size,
            read=pl_module.read,
            parameters=parameters(pl_module),
            callbacks=[type(each).__name__ for each in trainer.callbacks],
        )


if __name__ == "__main__":
    *strategies, last = sys.argv[1:]
    nodes = int(last.removeprefix("num_nodes=")) if "num_nodes=" in last else None
    for place, strategy in enumerate(strategies if nodes else [*strategies, last]):
        record = Record(place)
        trainer = quiet_trainer(strategy=strategy, devices=2, num_nodes=nodes or 1, callbacks=[record])
        model = Regression()
        trainer.fit(model, loader())
        before = parameters(Regression())
        assert parameters(model) != before, "the trained weights come back"
