"""examples/fabric: on a laptop, and in a job that it knows nothing of."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.preloaded import start_forked

from azureml_strategy.emulator import EmulatedJob, emulate

SCRIPT = Path(__file__).parents[2] / "examples" / "fabric" / "train.py"


@pytest.fixture
def final_loss(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, float]]:
    """Run the script in a job of this size, and return who trained and what rank 0 printed as its loss."""
    monkeypatch.setattr("azureml_strategy.emulator.processes._start", start_forked)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def run(strategy: str, nodes: int, processes: int) -> tuple[int, float]:
        command = [sys.executable, str(SCRIPT), "--steps", "20", "--strategy", strategy]
        exit_code = emulate(EmulatedJob(command=command, nodes=nodes, processes_per_node=processes))
        output = capsys.readouterr().out
        assert exit_code == 0, output
        (found,) = re.findall(r"20 steps by (\d+) process\(es\), final loss ([0-9.]+)", output)
        return int(found[0]), float(found[1])

    return run


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in ("azureml_model_parallel", "azureml_deepspeed_stage_2")
        ),
    ],
)
def test_a_job_of_two_nodes_ends_with_the_loss_of_one_process(
    final_loss: Callable[..., tuple[int, float]], strategy: str
) -> None:
    alone, expected = final_loss(strategy, 1, 1)
    world_size, loss = final_loss(strategy, 2, 2)
    assert (alone, world_size) == (1, 4)
    assert loss == pytest.approx(expected, rel=1e-4)
