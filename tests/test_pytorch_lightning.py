"""Scripts that import `pytorch_lightning`, the separate copy of Lightning, under a job's variables."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables
from azureml_strategy.cluster.launch import Launch

pytest.importorskip("pytorch_lightning")
SCRIPT = """
import sys
from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel

quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
limits = dict(max_steps=1, limit_val_batches=1, limit_test_batches=1)
for entry, arguments in eval(sys.argv[1]):
    trainer = Trainer(**arguments, **quiet, **limits)
    try:
        getattr(trainer, entry)(BoringModel())
        print(f"ended: {trainer.world_size} process(es)")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def lines(nodes: int, *calls: tuple[str, dict[str, object]]) -> list[str]:
    """What becomes of these calls, one after the other, on rank 0 of a job of one process a node."""
    launch = Launch("pytorch", 0, nodes, 0, 1, 0, nodes, "10.0.0.4", 6105)
    run = EmulatedRun("quirky_plum", "resnet50", "1", "file:mlruns")
    addresses = [f"10.0.0.{node + 4}" for node in range(nodes)]
    environ = {**os.environ, **azure_variables(launch, "pytorch", addresses, run)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, repr(calls)], capture_output=True, text=True, timeout=250, env=environ
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("ended") or "Error" in line]


def test_only_a_trainer_that_contradicts_the_launch_is_refused() -> None:
    refused, tested = lines(2, ("fit", {"devices": 1}), ("test", {"devices": 1, "num_nodes": 1}))
    assert refused.startswith("LaunchError: This Trainer wants 1 process(es)")
    assert "each group of that size would train alone" in refused
    assert "Write `from lightning.pytorch import Trainer`" in refused
    assert tested == "ended: 1 process(es)"


def test_a_trainer_of_the_jobs_size_trains() -> None:
    assert lines(1, ("fit", {"devices": 1})) == ["ended: 1 process(es)"]
