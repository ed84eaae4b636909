"""Two ranks, killed at any moment, any number of times, end with the model and the curve of the undisturbed run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.multiprocess.conftest import RunJob
from tests.multiprocess.scripts.noisy import curve

from azureml_strategy.checkpoint.storage_folder import CheckpointFolder

# The longest time from the start of training to a kill, in seconds: about that of half a run.
LONGEST = {"ddp": 1.0, "zero": 4.0, "pipeline": 4.0, "model_parallel": 2.0}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", LONGEST)
def test_killed_at_random_moments(
    run_job: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr("azureml_strategy.emulator.processes._GRACE_SECONDS", 1.0)
    whole = run_job("resume.py", strategy, tmp_path / "whole", "none", 0, nodes=2)
    assert whole.exit_code == 0, whole.output
    survive(run_job, tmp_path, strategy, attempts=4 if strategy == "ddp" else 1)
    again = run_job("resume.py", strategy, tmp_path / "killed", "none", 0, nodes=2)
    assert again.exit_code == 0, again.output
    assert again.each("weights") == whole.each("weights")
    assert again.each("step") == whole.each("step")
    assert curve(tmp_path / "killed" / "curve.jsonl") == curve(tmp_path / "whole" / "curve.jsonl")


def survive(run_job: RunJob, tmp_path: Path, strategy: str, attempts: int) -> None:
    """Kill rank 0, rank 1 or both, once while they start; at last in such a way that there is a checkpoint."""
    moments = random.Random(f"6/{strategy}")
    times = [-moments.uniform(0, 0.5), *(moments.uniform(0, LONGEST[strategy]) for _ in range(attempts))]
    codes: list[int] = []
    while times or not CheckpointFolder(tmp_path / "killed" / "checkpoints").complete():
        # later and later: a machine that is busy may take long to the first checkpoint
        killed, seconds = moments.choice(["0", "1", "0,1"]), times.pop() if times else LONGEST[strategy] * len(codes)
        codes.append(run_job("resume.py", strategy, tmp_path / "killed", killed, seconds, nodes=2).exit_code)
        if codes[-1] == 0:
            break  # on a fast machine it was done before the kill: the next start finds nothing left to do
    assert any(codes), "no kill came in time"
