"""Trains under strategies one after another, and tells at the very end of the process whether there is a process group.

Arguments: how the script ends, and the strategies. Within a fit
`raise_in_fit` lets the last rank fail, and `sigterm` sends the signal.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from common import Regression, loader, quiet_trainer, report
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.strategies import AzureMLDeepSpeedStrategy, AzureMLLocalSGDStrategy, PipelineStrategy
from strategies import STRATEGIES, tiny_gpt

RANK, LAST = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) - 1
how, names = sys.argv[1], sys.argv[2:]
seen: dict[str, Any] = {"groups": []}


# Exit handlers run in reverse order: this one after all that come with a training.
@atexit.register
def tell() -> None:
    report(RANK, **seen, left=dist.is_initialized())


ALL = STRATEGIES | {
    "local_sgd": lambda: AzureMLLocalSGDStrategy(period=2),
    "diloco": lambda: AzureMLLocalSGDStrategy(period=2, delay=1, outer_learning_rate=0.7),
    "zero_1": lambda: AzureMLDeepSpeedStrategy(stage=1),
    "one_stage": lambda: PipelineStrategy(num_stages=1, micro_batches=2),
}


class Fails(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        if RANK == LAST:
            raise ValueError("of one rank alone")


class Stops(Callback):
    def on_train_start(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


CALLBACKS: dict[str, list[type[Callback]]] = {"raise_in_fit": [Fails], "sigterm": [Stops]}


def fit(name: str) -> None:
    callbacks = [make() for make in CALLBACKS.get(how, [])]
    model: LightningModule
    data: DataLoader[Any]
    trainer: Trainer = quiet_trainer(strategy=ALL[name](), max_epochs=4, callbacks=callbacks, limit_val_batches=1)
    if name in ("one_stage", "model_parallel"):
        tokens = torch.arange(64 * 8).view(64, 8) % 32
        model, data = tiny_gpt(), DataLoader(TensorDataset(tokens, tokens), batch_size=8)
    else:
        model, data = Regression(), loader()
    trainer.fit(model, data, data)
    trainer.validate(model, data, verbose=False)


def by_fabric(name: str) -> None:
    fabric = Fabric(accelerator="cpu", strategy=name)
    fabric.launch()
    network = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
    for rows, _ in fabric.setup_dataloaders(loader()):
        fabric.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        break


if how == "own":
    dist.init_process_group("gloo")
for name in names:
    by_fabric(name.removeprefix("fabric:")) if name.startswith("fabric:") else fit(name)
    seen["groups"].append(id(dist.group.WORLD))
if how == "exit":
    sys.exit(3)
if how == "raise":
    raise ValueError("of the script")
