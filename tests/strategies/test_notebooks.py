"""Trainers in interactive sessions: scripts that Lightning takes for a notebook's kernel, by `sys.ps1`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.emulated import SHARED_MACHINE

NOTEBOOK = """
import sys
sys.ps1 = "In : "
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
import azureml_strategy

def fit(strategy, devices):
    seed_everything(1)
    model = BoringModel()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", strategy=strategy, devices=devices, max_steps=8, **quiet)
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    launcher = type(trainer.strategy.launcher).__name__
    print("FIT", trainer.world_size, launcher, torch.distributed.is_initialized(), model.layer.bias.tolist())
"""


def cells(code: str, *, job: bool = False) -> subprocess.CompletedProcess[str]:
    prefix = [sys.executable, "-m", "azureml_strategy.cli", "emulate", "--nodes", "2", "--"] if job else []
    command = [*prefix, sys.executable, "-c", NOTEBOOK + code]
    environ = {**os.environ, **SHARED_MACHINE}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110)


def fits(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("FIT ")[2].split(maxsplit=3) for line in done.stdout.splitlines() if "FIT " in line]


# Cells that fail one after the other.
REFUSED = """
for strategy in ("azureml_model_parallel", "azureml_deepspeed", "azureml_deepspeed_pipeline", "azureml_ddp"):
    if strategy == "azureml_ddp":
        torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        fit(strategy, 2)
    except Exception as error:
        print("REFUSED", strategy, error)
"""


def test_one_device_needs_no_other_process_several_are_forked_and_what_is_not_says_what_to_type() -> None:
    """One cell after the other, with the weights of Lightning's own strategy for notebooks.

    Refused are the other strategies, and one that would be forked with the group of an earlier cell.
    """
    names = ("azureml_ddp", "azureml_ddp_notebook", "ddp_notebook")
    done = cells("fit('azureml_ddp', 1)\n" + "\n".join(f"fit({name!r}, 2)" for name in names) + REFUSED)
    one, *several = fits(done)
    assert one[:3] == ["1", "NoneType", "False"], "its group does not stay"
    assert [each[:3] for each in several] == [["2", "_MultiProcessingLauncher", "False"]] * 3
    assert several[0] == several[1] == several[2]
    _, *others, last = done.stdout.split("REFUSED")
    assert len(others) == 3, done.stdout
    for told in others:
        assert "write strategy='azureml_ddp', which forks this process; or devices=1" in told
    assert "restart the kernel" in last


@pytest.mark.exhaustive
def test_in_a_job_whose_processes_are_all_there_a_notebook_trains() -> None:
    ranks = fits(cells("fit('azureml_ddp', 1)", job=True))
    assert [each[:2] for each in ranks] == [["2", "NoneType"]] * 2


@pytest.mark.exhaustive
def test_in_a_job_no_process_is_forked() -> None:
    done = cells("fit('azureml_ddp', 2)", job=True)
    assert done.returncode == 1
    assert "set the job's `process_count_per_instance` to 2" in done.stdout + done.stderr
