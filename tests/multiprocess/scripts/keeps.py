"""A training whose module, callback and data module keep values of all kinds, stopped and gone on with."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from omegaconf import OmegaConf
from tests.multiprocess.scripts.common import report
from tests.multiprocess.scripts.noisy import FEATURES, Numbers
from torch import Tensor, nn

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.consolidate import checkpoint_format, consolidate
from azureml_strategy.checkpoint.resume import newest_valid
from azureml_strategy.checkpoint.serialization import saved_hyperparameters


class Colour(Enum):
    RED = "red"


@dataclass
class Settings:
    path: Path
    width: int = 3


def twice(value: int) -> int:
    return 2 * value


VALUES: dict[str, Any] = {
    "path": Path("/data"),
    "numpy scalar": np.float64(0.1),
    "numpy array": np.arange(3.0),
    "numpy dtype": np.dtype("float32"),
    "config": OmegaConf.create({"model": {"layers": [1, 2]}, "rate": "${model.layers}"}),
    "list config": OmegaConf.create([1, {"a": 2}]),
    "partial": partial(torch.optim.AdamW, lr=0.1),
    "datetime": datetime(2026, 1, 2, 3, tzinfo=UTC),
    "date": date(2026, 1, 2),
    "timedelta": timedelta(hours=1),
    "namespace": Namespace(width=3, path=Path("/data")),
    "function": twice,
    "class": Settings,
    "enum": Colour.RED,
    "dataclass": Settings(Path("/data")),
    "set": {Path("/data"), 1},
    "frozenset": frozenset({1, 2}),
    "range": range(3),
    "torch's and complex": (torch.device("cpu"), torch.float16, torch.Size([1, 2]), 1j, {1, 2}),
    "nested": {"a": [({"b": Path("/data")}, frozenset({1}))]},
}


class StoppedError(Exception):
    """In place of SIGKILL."""


class Keeper(Callback):
    """Keeps values and is given them back; or ends the training at a batch."""

    def __init__(self, values: Any, batches: int) -> None:
        self.values, self.given, self.batches, self.found = values, None, batches, None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.batches:
            raise StoppedError

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict["values"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["of_callback"] = self.values

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["of_callback"]


@dataclass(frozen=True)
class Layer:
    """One of a pipeline's."""

    name: str
    inputs: int
    outputs: int
    kind: str = "linear"
    tied: str | None = None
    tied_parameter: str = "weight"

    def build(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.outputs)
            return nn.Linear(self.inputs, self.outputs)


LAYERS = (Layer("network.0", FEATURES, 4), Layer("network.1", 4, 1))


class Network(LightningModule):
    """Two layers that a pipeline can cut; its learning rate is numpy's where the values are."""

    def __init__(self, values: Any, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.values, self.given, self.found = values, None, None
        self.network = nn.ModuleList()

    def configure_model(self) -> None:
        if not len(self.network):
            self.network.extend(each.build() for each in LAYERS)

    def pipeline_layers(self) -> tuple[Layer, ...]:
        return LAYERS

    def pipeline_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]

    def sharded_blocks(self) -> list[nn.Module]:
        return list(self.network)

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.network:
            rows = layer(rows)
        return rows

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        numpy = isinstance(self.values, np.generic) or self.values is VALUES
        number = np.float64 if numpy else float
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: number(0.9) ** step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of_module"] = {"values": self.values, "count": 3}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.given = checkpoint["of_module"]["values"]
        self.found = checkpoint["hyper_parameters"]["values"]


class Rows(Numbers):
    def __init__(self, values: Any, batch_size: int = 2) -> None:
        super().__init__(batch_size=batch_size)
        self.save_hyperparameters()
        self.values, self.given = values, None

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict["values"]


def fit(folder: Path, values: Any, strategy: Strategy | str, batches: int = -1, **checkpoint: Any) -> dict[str, Any]:
    """Train, or go on with what is in a folder; what was given back to whom, and the weights."""
    seed_everything(1, verbose=False)
    module, data, keeper = Network(values), Rows(values), Keeper(values, batches)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=4,
        callbacks=[keeper, JobCheckpoint(folder, every_n_train_steps=2, **checkpoint)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    trainer.fit(module, datamodule=data, ckpt_path=newest_valid(folder))
    places = {
        "module": module.given,
        "hyperparameters": module.found,
        "state of the callback": keeper.given,
        "entry of the callback": keeper.found,
        "data module": data.given,
    }
    rates = [float(group["lr"]) for each in trainer.optimizers for group in each.param_groups]
    return {"weights": _weights(folder), "rates": rates, "places": places}


def _weights(folder: Path) -> Any:
    """Those of the newest checkpoint."""
    newest = newest_valid(folder)
    assert newest is not None
    return {name: tensor.tolist() for name, tensor in checkpoint_format(newest).read(newest)["state_dict"].items()}


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of one type; arrays and partials do not say so by `==`."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(each, other[name]) for name, each in one.items())
    return repr(one) == repr(other) if isinstance(one, (np.ndarray, partial)) else bool(one == other)


def stop_and_go_on(folder: Path, values: Any, strategy: Any) -> dict[str, Any]:
    """Which places have not been given back what they had; the weights and the learning rates at the end."""
    with suppress(StoppedError):
        fit(folder / "stopped", values, strategy(), batches=3)
    again = fit(folder / "stopped", values, strategy())
    wrong = [place for place, given in again.pop("places").items() if not same(given, values)]
    return {"wrong": wrong, **again}


def strategies() -> dict[str, Any]:
    from azureml_strategy.strategies import (
        AzureMLDDPStrategy,
        AzureMLDeepSpeedStrategy,
        AzureMLModelParallelStrategy,
        PipelineStrategy,
    )

    return {
        "ddp": AzureMLDDPStrategy,
        "stage_2": AzureMLDeepSpeedStrategy,
        "stage_3": lambda: AzureMLDeepSpeedStrategy(stage=3),
        "model_parallel": AzureMLModelParallelStrategy,
        "one_file": lambda: AzureMLModelParallelStrategy(save_distributed_checkpoint=False),
        "pipeline": lambda: PipelineStrategy(num_stages=2, micro_batches=2),
    }


def main() -> None:
    """All kinds at once, and what came of it."""
    name, rank, folder = sys.argv[1], int(os.environ["RANK"]), Path(os.environ["RESULTS"]).parent
    strategy = strategies()[name]
    whole = fit(folder / "whole", VALUES, strategy())
    again = stop_and_go_on(folder, VALUES, strategy)
    newest = newest_valid(folder / "stopped")
    assert newest is not None
    consolidate(newest, folder / f"{rank}.ckpt")
    kept = saved_hyperparameters(folder / f"{rank}.ckpt", trust_pickles=True)
    results = {each: again[each] == whole[each] for each in ("weights", "rates")}
    report(rank, wrong=again["wrong"], consolidated=same(kept, {"values": VALUES, "width": 4}), **results)


if __name__ == "__main__":
    main()
