"""A rank of a real process group that trains recipes one after another, and reports what it holds after three steps."""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import open_dict

from azureml_strategy.planning import held_state as counting
from azureml_strategy.planning.batches import data_section
from azureml_strategy.planning.pretended_recipe import compose_for_gpus
from azureml_strategy.training.run import train


class Hold(Callback):
    """Counts what the rank holds, and beside it all tensors that are alive."""

    def __init__(self) -> None:
        self.gradients = 0
        self.state: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.gradients = counting.gradient_bytes(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.state = asdict(counting.held_state(trainer, self.gradients)) | {"alive": alive_bytes()}


def alive_bytes() -> int:
    """The bytes of all storages of tensors that Python knows."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = {}
    for each in tensors:
        local = getattr(each, "_local_tensor", each)
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


_RUNNING: list[Hold] = []


def running() -> Hold:
    """The callback of the run that is being made, for Hydra."""
    return _RUNNING[-1]


def hold(recipe: str, overrides: list[str]) -> dict[str, int]:
    """Train a recipe for three steps."""
    config = compose_for_gpus(recipe, overrides)
    _RUNNING.append(Hold())
    with open_dict(config):
        config.data = data_section(config.data, int(os.environ["WORLD_SIZE"]))
        config.trainer.max_steps = 3
        config.trainer.limit_val_batches = 0
        config.callbacks = {"_target_": "__main__.running"}
    train(config)
    return running().state


if __name__ == "__main__":
    found = {name: hold(recipe, overrides) for name, recipe, overrides in json.loads(sys.argv[1])}
    folder = Path(os.environ["RESULTS"])
    folder.mkdir(exist_ok=True)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
