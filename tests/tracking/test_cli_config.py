"""LightningCLI saves its configuration where stock Lightning would raise, in interpreters of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from azureml_strategy.cluster.environ import CLI_CONFIG_SWITCH

SCRIPT = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def __init__(self, secret: str = "") -> None:
        super().__init__()

LightningCLI(Model)
"""
QUIET = ("checkpointing", "progress_bar", "model_summary")
FIT = [
    "fit",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=1",
    *(f"--trainer.enable_{name}=false" for name in QUIET),
]
OURS = "--trainer.logger=azureml_strategy.tracking.JobMLFlowLogger"


def run(*words: str, **environ: str) -> str:
    """The errors of the script; the fits come one after the other in one folder."""
    command = [sys.executable, "-c", SCRIPT, *FIT, *words]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=110)
    return "" if done.returncode == 0 else done.stderr


@pytest.mark.exhaustive
def test_a_restarted_job_overwrites_its_own_file_and_another_run_does_not() -> None:
    folder = "--trainer.logger=false"
    first, second = ({"AZUREML_CR_COMPUTE_CONTEXT": f'{{"run_attempt_count": {attempt}}}'} for attempt in (0, 1))
    job = {"AZUREML_RUN_ID": "quirky_plum"}
    assert not run(folder, **job, **first)
    Path("config.yaml").write_text("of the first attempt")
    assert "expected" in run(folder, **job, **first)
    assert "expected" in run(folder, **job, **second, **{CLI_CONFIG_SWITCH: "off"})
    assert Path("config.yaml").read_text() == "of the first attempt"
    assert not run(folder, **job, **second)
    assert "max_steps: 1" in Path("config.yaml").read_text()


@pytest.mark.exhaustive
def test_with_our_logger_it_goes_into_the_run_without_secrets() -> None:
    secret = "AccountKey=c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"
    assert not run(OURS, f"--model.secret={secret}")
    assert not run(OURS)
    texts = [path.read_text() for path in sorted(Path("mlruns").glob("*/*/artifacts/config.yaml"))]
    assert len(texts) == 2
    assert all("max_steps: 1" in text and "c2VjcmV0" not in text for text in texts)
    assert not Path("config.yaml").exists(), "a file of that name may be the user's own"
