"""`emulate --pretend-ranks`: a user's script believes that it is a rank of 64, and writes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.documentation.world import SCRIPT as SCRIPT_OF_A_READER

from azureml_strategy.cli import main
from azureml_strategy.planning.preflight import try_command

SCRIPT = str(Path(__file__).parents[1] / "planning" / "scripts" / "own_script.py")


def command(strategy: str, width: int, folder: Path, nodes: int = 1) -> list[str]:
    return [sys.executable, SCRIPT, strategy, str(width), str(folder), str(nodes)]


# A process of its own, because the peak is that of all children that a process ever had.
PEAK = """
import resource, sys
from azureml_strategy.cli import main
code = main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def test_a_script_as_64_ranks(tmp_path: Path) -> None:
    """Of 1.7 billion parameters: they would take 26 GB, and the processes take less than two."""
    words = ["emulate", "--pretend-ranks", "64", "--", *command("azureml_ddp", 41_000, tmp_path)]
    done = subprocess.run([sys.executable, "-c", PEAK, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parameters = 32 * 41_000 + 41_000**2 + 3 * 41_000 + 1
    assert "64 data parallel = 64 ranks; a rank's batch: 16 x 32, 16 x 1" in done.stdout
    assert f"63 (last of data parallel): {4 * parameters / 2**20:,.1f} + " in done.stdout
    assert list(tmp_path.iterdir()) == [], "no checkpoint, no log"
    assert int(done.stdout.split()[-1]) < 2e6, "kB"


def test_a_rank_whose_epoch_is_a_single_batch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT_OF_A_READER)
    preflight = try_command([sys.executable, str(script)], nodes=8, processes_per_node=8)
    assert preflight.starts, preflight.problem
    assert preflight.batch == [[2, 4]]


@pytest.mark.exhaustive
def test_a_stock_strategy_that_wants_the_gpus_themselves(tmp_path: Path) -> None:
    """It may be right on GPUs: the answer is that it could not be tried, and why."""
    preflight = try_command(command("deepspeed_stage_2", 512, tmp_path, nodes=8), nodes=8, processes_per_node=8)
    assert not preflight.starts
    assert not preflight.told
    assert "could not be tried" in preflight.lines()[0]
    assert "only supported on CUDA GPUs" in preflight.problem


@pytest.mark.exhaustive
def test_numbers_of_another_job_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command("azureml_ddp", 64, tmp_path, nodes=3)
    assert main(["emulate", "--pretend-ranks", "16", "--processes-per-node", "4", "--", *arguments]) == 1
    assert "Trainer(num_nodes=3), but the job has 4 node(s)" in capsys.readouterr().out


def test_a_script_that_trains_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('hello')")
    preflight = try_command([sys.executable, str(script)], nodes=1, processes_per_node=2)
    assert not preflight.starts
    assert "no Trainer of `lightning` took a step" in preflight.problem
    assert preflight.output == ["hello"]


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "--pretend-ranks", "64", "--nodes", "2", "--", "true"]) == 2
    assert "Leave --nodes out" in capsys.readouterr().err
    assert main(["emulate", "--pretend-ranks", "12", "--", "true"]) == 2
    assert "Use a multiple of 8" in capsys.readouterr().err
