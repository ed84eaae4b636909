"""Fits in which a part of the callbacks that every Trainer of a job has fails on rank 1 alone."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch
from common import Regression, loader, quiet_trainer, report

from azureml_strategy.control import agreement
from azureml_strategy.hang_detection import callback as watching
from azureml_strategy.preemption import termination
from azureml_strategy.tracking import network

RANK = int(os.environ["RANK"])
# (where, what): each is called by a hook, or by what a hook calls
FAULTS: list[tuple[Any, str]] = [
    (watching, "this_process"),
    (watching.HangWatch, "_start"),
    (watching.Progress, "batch_done"),
    (termination.TerminateTogether, "_prepare"),
    (termination.TerminateTogether, "_poller"),
    (agreement.StopAgreement, "step_done"),
    (network, "run_network"),
]


def fail(*arguments: object, **named: object) -> None:
    raise RuntimeError("a fault of ours")


steps: dict[str, int] = {}
for owner, name in FAULTS:
    trainer = quiet_trainer(strategy="ddp", num_nodes=2, devices=1, limit_val_batches=1)
    failing = 0 if owner is network else 1  # the network is recorded by rank 0
    with patch.object(owner, name, fail if failing == RANK else getattr(owner, name)):
        trainer.fit(Regression(), loader(), loader())
    print(f"done: {name}", flush=True)
    trainer.test(trainer.lightning_module, loader(), verbose=False)  # meets in collectives again
    steps[name] = trainer.global_step
report(RANK, steps=steps, initialized=torch.distributed.is_initialized())
