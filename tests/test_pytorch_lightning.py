"""Scripts that import `pytorch_lightning`, the separate copy of Lightning, under a job's variables."""

from __future__ import annotations

import subprocess
import sys

import pytest

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables
from azureml_strategy.cluster.launch import Launch

pytest.importorskip("pytorch_lightning")
SCRIPT = """
import os
import sys
import {imports}
from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel

quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
limits = dict(max_steps=1, limit_val_batches=1, limit_test_batches=1)


def call(entry, arguments):
    try:
        trainer = Trainer(**arguments, **quiet, **limits)
        getattr(trainer, entry)(BoringModel())
        print(f"ended: {{trainer.world_size}} process(es)")
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")


# Each job is another process, which need not import all anew.
for environ, calls in eval(sys.argv[1]):
    child = os.fork()
    if not child:
        os.environ.update(environ)
        for each in calls:
            call(*each)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
Call = tuple[str, dict[str, object]]


def in_a_job(nodes: int) -> dict[str, str]:
    """The variables of rank 0 of a job of one process a node."""
    launch = Launch("pytorch", 0, nodes, 0, 1, 0, nodes, "10.0.0.4", 6105)
    run = EmulatedRun("quirky_plum", "resnet50", "1", "file:mlruns")
    return azure_variables(launch, "pytorch", [f"10.0.0.{node + 4}" for node in range(nodes)], run)


def lines(imports: str, *jobs: tuple[dict[str, str], list[Call]]) -> list[str]:
    """What becomes of the calls of these jobs, one after the other."""
    command = [sys.executable, "-c", SCRIPT.format(imports=imports), repr(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("ended") or "Error" in line]


def test_only_what_contradicts_the_launch_or_asks_for_our_strategies_is_refused() -> None:
    fit: Call = ("fit", {"devices": 1})
    refused, tested, trained, ours = lines(
        "pytorch_lightning, azureml_strategy",
        (in_a_job(2), [fit, ("test", {"devices": 1, "num_nodes": 1})]),
        (in_a_job(1), [fit]),
        ({}, [("fit", {"strategy": "azureml_ddp"})]),
    )
    assert refused.startswith("LaunchError: This Trainer wants 1 process(es)")
    assert "each group of that size would train alone" in refused
    assert "Write `from lightning.pytorch import Trainer`" in refused
    assert tested == trained == "ended: 1 process(es)"
    assert ours.startswith("ImportError: ")
    assert "Write `from lightning.pytorch import Trainer`" in ours


@pytest.mark.exhaustive
def test_our_strategies_are_refused_when_we_are_imported_first() -> None:
    (refused,) = lines("azureml_strategy, pytorch_lightning", ({}, [("fit", {"strategy": "azureml_ddp"})]))
    assert "Write `from lightning.pytorch import Trainer`" in refused
