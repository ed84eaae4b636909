"""In which mode the layers of a pipeline run: those of the module, frozen ones, and those that stages build alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from common import quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.strategies import PipelineStrategy

seen: dict[str, set[bool]] = {}
moment = "fit"


class Watched(nn.Dropout):
    """Notes its mode whenever it runs."""

    def __init__(self, name: str) -> None:
        super().__init__(0.5)
        self.name = name

    def forward(self, inputs: Tensor) -> Tensor:
        seen.setdefault(f"{moment}: {self.name}", set()).add(self.training)
        return super().forward(inputs)


@dataclass(frozen=True)
class Layer:
    """One layer of the chain; `build` makes it anew where the module does not have it."""

    name: str
    build: Any
    kind: str = "layer"
    tied: None = None
    tied_parameter: str = "weight"


class Dropouts(LightningModule):
    """Dropout that the module has, that is frozen, also by a second name, and that each stage builds for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = ("linear", "held", "frozen", "alone", "borrowed") * 2
        names = [f"{part}_{index}" for index, part in enumerate(parts)]
        self.names = names
        for name in names:
            if not name.startswith(("alone", "borrowed")):
                self.add_module(name, nn.Linear(4, 4) if name.startswith("linear") else Watched(name))

    def forward(self, inputs: Tensor) -> Tensor:
        raise AssertionError("the pipeline gives the outputs")

    def pipeline_layers(self) -> list[Layer]:
        return [Layer(name, lambda name=name: self._build(name)) for name in self.names]

    def _build(self, name: str) -> nn.Module:
        if name.startswith("borrowed"):  # the module holds it by another name
            return self.get_submodule("frozen_2" if name == "borrowed_4" else "frozen_7")
        return Watched(name) if name.startswith("alone") else self.get_submodule(name)

    def pipeline_batch(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[0]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).pow(2).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Moments(Callback):
    """Freezes what is to be frozen, and tells what runs."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, layer in pl_module.named_children():
            if name.startswith("frozen"):
                layer.eval()

    def on_validation_start(self, *_: Any) -> None:
        self._is("validation")

    def on_validation_end(self, *_: Any) -> None:
        self._is("fit")

    def _is(self, now: str) -> None:
        global moment
        moment = now


def main() -> None:
    global moment
    rows = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    strategy = PipelineStrategy(num_stages=int(os.environ["WORLD_SIZE"]), micro_batches=2, partition="uniform")
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, callbacks=[Moments()])
    module = Dropouts()
    trainer.fit(module, rows, rows)
    moment = "test"
    trainer.test(module, rows)
    report(int(os.environ["RANK"]), modes={name: sorted(modes) for name, modes in seen.items()})


main()
