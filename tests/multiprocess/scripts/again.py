"""A module that is trained, evaluated and trained again, whose steps call its layers."""

from __future__ import annotations

import os
from typing import Any

from common import FEATURES, Regression, loader, quiet_trainer, report
from torch import Tensor
from torch.distributed.tensor import DTensor

from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLModelParallelStrategy


class Layers(Regression):
    """It calls `self.network`, never itself; its last training step is followed by an evaluation."""

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.network(batch[0][:, :FEATURES])


def train_twice(strategy: Any) -> dict[str, Any]:
    module = Layers()
    kinds = []
    for use in ("validate", "fit", "test", "fit"):
        trainer = quiet_trainer(strategy=strategy(), max_epochs=1)
        getattr(trainer, use)(module, loader(), *([loader()] if use == "fit" else []))
        kinds.append(all(isinstance(each, DTensor) for each in module.parameters()))
    return {"losses": module.losses, "in_shards": kinds}


report(int(os.environ["RANK"]), ddp=train_twice(AzureMLDDPStrategy), fsdp2=train_twice(AzureMLModelParallelStrategy))
