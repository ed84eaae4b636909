"""Two ranks whose threads write checkpoints behind the training: slowly, and one of them not always."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.multiprocess.conftest import RunJob

from azureml_strategy.checkpoint.folder import CheckpointFolder


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "model_parallel",
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("zero", "zero_2", "pipeline")),
    ],
)
def test_written_in_the_background_on_all_ranks(run_job: RunJob, tmp_path: Path, strategy: str) -> None:
    job = run_job("background_writer.py", strategy, tmp_path / "run", nodes=2, extra={"PYTHONWARNINGS": "default"})
    assert job.exit_code == 0, job.output
    assert job.each("threads") == [["checkpoint-writer"]] * 2
    # begun at step 6 and not yet written when one of step 7 was asked for: both are complete on return
    assert job.each("complete") == [[7, 6]] * 2, job.output
    assert job.each("asked") == ["epoch=0-step=7.ckpt"] * 2
    assert "No checkpoint at step 4: rank 1: this disk is full. Training goes on" in job.output
    assert "No checkpoint at step 2: rank 1: its state cannot be copied (MemoryError: not 1 byte)" in job.output
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    complete = folder.complete()
    assert all(each.fault(folder.path) is None for each in complete)
    assert not list(folder.path.glob("*.incomplete"))
    assert job.each("last") == [complete[0].name] * 2
