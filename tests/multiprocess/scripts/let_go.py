"""Trains under each strategy and lets go of all: what is still there? And where does a module make its own loader?

    python let_go.py TRAININGS LAYOUT...

So many trainings under each layout follow a first one, to see the groups that they make.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from common import report
from tests.situations.modules import Regression, loader
from tests.situations.running import make_trainer, prepare, replica
from torch import nn


class OwnLoader(Regression):
    """It is built in `configure_model`, and has a loader of its own."""

    device_of_loader: torch.device | None = None

    def configure_model(self) -> None:
        pass

    def train_dataloader(self) -> Any:
        self.device_of_loader = torch.get_default_device()
        return loader(*replica("zero_2"))


class Unfinished(Regression):
    """It fails after `configure_model`, before a pipeline has cut it."""

    def configure_model(self) -> None:
        self.more = nn.Linear(2, 2)

    def pipeline_layers(self) -> Any:
        raise ValueError("an error of the user's")


def error_of_unfinished() -> str:
    try:
        make_trainer("pipeline").fit(Unfinished(), loader(*replica("pipeline")))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def left_of(layout: str) -> dict[str, Any]:
    """The hooks that are on the parameters after a training, and what lives after its last reference has gone."""
    module, trainer = Regression(), make_trainer(layout)
    trainer.fit(module, loader(*replica(layout)))
    made = [weakref.ref(each) for each in (trainer.strategy.model, trainer.strategy, trainer, module)]
    hooks = sum(len(each._post_accumulate_grad_hooks or ()) for each in module.parameters())
    del trainer, module
    for _ in range(100):  # threads of torch's and ours may hold some for a moment
        gc.collect()
        if all(each() is None for each in made):
            break
        time.sleep(0.1)
    return {"hooks": hooks, "alive": [type(each()).__name__ for each in made if each() is not None]}


def new_groups(layout: str) -> list[int]:
    """How many process groups each further training makes, and leaves."""
    numbers = [len(dist.distributed_c10d._world.pg_map)]
    for _ in range(int(sys.argv[1])):
        make_trainer(layout).fit(Regression(), loader(*replica(layout)))
        numbers.append(len(dist.distributed_c10d._world.pg_map))
    return [after - before for before, after in pairwise(numbers)]


def device_of_loader(layout: str) -> str:
    module = OwnLoader()
    make_trainer(layout).fit(module)
    return str(module.device_of_loader)


prepare()
layouts = sys.argv[2:]
report(
    int(os.environ["RANK"]),
    left={layout: left_of(layout) for layout in layouts},
    error=error_of_unfinished(),
    groups={layout: new_groups(layout) for layout in layouts},
    loaders={layout: device_of_loader(layout) for layout in layouts if layout.startswith("zero")},
)
