"""The command of a rendered job, as a node of Azure ML runs it: real shell, real `azureml-strategy train`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.jobs.rendering import cache, rendered

from azureml_strategy.checkpoint.resume import newest_valid

__all__ = ["cache"]  # a fixture
CLUSTER = ["cluster=nc24ads_a100_v4", "cluster.tier=low_priority"]
NOTE = """+vars.note='a $HOME "b"'"""
TINY = [
    *("data.image_size=32", "data.batch_size=2", "data.steps_per_epoch=2", "trainer.limit_val_batches=1"),
    *("num_classes=2", "trainer.precision=32-true", "trainer.accelerator=cpu", "trainer.devices=1", "checkpoint=best"),
]


def run(job: dict[str, str], paths: dict[str, Path], *more: str) -> str:
    """Run the command with the paths that the service writes into it."""
    command = job["command"]
    for name, path in paths.items():
        command = command.replace(f"${{{{{name}}}}}", str(path))
    environ = {**os.environ, "AZUREML_RUN_ID": "run", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    command = " ".join([command, *more])
    done = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_train_takes_the_command(tmp_path: Path) -> None:
    job = rendered("resnet50_imagenet", *CLUSTER, NOTE)
    paths = {"inputs.images": tmp_path / "INPUT_images", "outputs.run": tmp_path / "run"}
    config = yaml.safe_load(run(job, paths, "--cfg", "job"))
    assert (config["data"]["root"], config["output_dir"]) == (str(paths["inputs.images"]), str(paths["outputs.run"]))
    assert config["vars"]["note"] == 'a $HOME "b"'
    assert (config["cluster"]["vm_size"], config["cluster"]["tier"]) == ("Standard_NC24ads_A100_v4", "low_priority")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_checkpoints_go_to_the_output(tmp_path: Path) -> None:
    job = rendered("resnet50_synthetic", *CLUSTER, *TINY)
    run(job, {"outputs.run": tmp_path / "mounted"})
    assert newest_valid(tmp_path / "mounted") is not None
    (recorded,) = tmp_path.glob("outputs/**/.hydra/overrides.yaml")
    assert "cluster=nc24ads_a100_v4" in recorded.read_text()
