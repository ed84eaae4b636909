"""Each benchmark runs with tiny numbers and writes what its page promises; how fast anything is, no test asks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, results: Path, *arguments: str) -> dict[str, Any]:
    """Run a script and read what it wrote."""
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--results", str(results), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    written = json.loads((results / f"{script}.json").read_text())
    assert written["benchmark"] == script
    assert {"cpu", "gpus", "packages"} <= written["machine"].keys()
    assert written["settings"]
    return written["figures"]


def test_startup(tmp_path: Path) -> None:
    figures = run("startup", tmp_path, "--rounds", "1", "--warmup", "0")
    assert figures["heavy_modules_imported"] == []
    assert figures["targets"].keys() == {"import azureml_strategy", "azureml-strategy --help"}
    for kind in ("wall_s", "added_s"):
        assert {"import lightning", "import hydra", *figures["targets"]} < figures[kind].keys()
    assert figures["wall_s"]["import lightning"].keys() == {"median", "low", "high", "count"}


@pytest.mark.slow
def test_ddp_step(tmp_path: Path) -> None:
    tiny = {"rounds": 1, "steps": 2, "network": "small", "pixels": 16, "batch-size": 2}
    figures = run("ddp_step", tmp_path, *(f"--{name}={value}" for name, value in tiny.items()))
    loopback = figures["loopback"]
    cases = {"torch", "lightning", "azureml_ddp"}
    assert loopback["step_s"].keys() == loopback["ratio_to_lightning"].keys() == cases
    assert loopback["ratio_to_lightning"]["lightning"]["median"] == 1
    assert loopback["target"]["azureml_ddp_at_most"] == 1.01
    assert len({round(total, 3) for total in loopback["trained_parameter_sum"].values()}) == 1, "they train alike"


@pytest.mark.slow
def test_resnet50_gpu(tmp_path: Path) -> None:
    figures = run("resnet50_gpu", tmp_path, "--smoke", "--rounds", "1")
    assert figures["copy_bytes_per_s"] > 0
    for mode in ("eager", "compiled"):
        half = figures[mode]
        assert half["images_per_s"].keys() == half["peak_memory_gib"].keys() == {"loop", "lightning", "recipe"}
        assert half["recipe_to_lightning"]["count"] == half["recipe_to_loop"]["count"] == 1
        assert half["share_of_memory_bound"]["recipe"]["measured copies"] > 0
    assert figures["compiled"]["graphs_compiled"] > figures["eager"]["graphs_compiled"] == 0
