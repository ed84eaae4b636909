"""A process of a job imports nothing of what people use at a desk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.multiprocess.conftest import RunJob
from tests.test_architecture import DESK, JOB, layer_of

# What `azureml-strategy train` starts with: the command line.
COMMAND_LINE = "azureml_strategy.cli"
TRAIN = """
import json, sys
from azureml_strategy.cli import main

code = main(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump([code, [name for name in sys.modules if name.startswith("azureml_")]], file)
"""


def above(modules: Iterable[str], layer: int) -> list[str]:
    return sorted(name for name in modules if layer_of(name) > layer)


def test_a_fit_in_a_job_imports_nothing_of_recipes_and_desk(run_job: RunJob, tmp_path: Path) -> None:
    environ = {"AZUREML_STRATEGY_CHECKPOINT": "auto"}
    job = run_job("imported_rooms.py", tmp_path / "fit", processes_per_node=2, extra=environ, fresh=True)
    assert job.exit_code == 0, job.output
    for modules, callbacks in zip(job.each("modules"), job.each("callbacks"), strict=True):
        assert {"HangWatch", "DataCheck", "ReplicaCheck"} <= set(callbacks)
        assert len(modules) > 50
        assert above(modules, JOB) == []


def test_a_recipe_imports_nothing_of_the_desk_but_its_command_line(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    words = ("train", "resnet50_synthetic", "trainer.max_steps=2", "trainer.limit_val_batches=0", "data.batch_size=2")
    command = [sys.executable, "-c", TRAIN, str(told), *words, f"output_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ.copy())
    assert done.returncode == 0, done.stderr
    code, modules = json.loads(told.read_text())
    assert code == 0
    assert [name for name in above(modules, DESK - 1) if not name.startswith(COMMAND_LINE)] == []
