"""Two ranks of a job choose the checkpoint to go on from: each checks half of it, and both take the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.conftest import put_checkpoint
from tests.multiprocess.conftest import Job, RunJob

from azureml_strategy.checkpoint.manifest import Manifest

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")


def _resume(run_job: RunJob, output: Path, *resume: object) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each value of `resume`, what rank 0 and rank 1 have done."""
    job: Job = run_job("resuming.py", output, *resume, nodes=2)
    assert job.exit_code == 0, job.output
    first, second = job.each("choices")
    return list(zip(first, second, strict=True))


def _size(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files.values())


def _damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


@pytest.mark.slow
def test_each_rank_reads_half_and_a_fault_that_one_finds_counts_for_both(run_job: RunJob, tmp_path: Path) -> None:
    output = tmp_path / "run"
    older, newer = (put_checkpoint(output / "checkpoints", step, shards=8) for step in (1, 2))
    path = output / "checkpoints" / newer.name
    ((first, second), (named, named_too)) = _resume(run_job, output, "auto", path)
    for each in (first, second, named, named_too):
        assert each["chosen"] == str(path)
        assert each["bytes"] == _size(newer) / 2
    assert not set(first["read"]) & set(second["read"])
    _damage(Path(second["read"][0]))
    ((first, second), (named, named_too)) = _resume(run_job, output, "auto", path)
    assert first["chosen"] == second["chosen"] == str(output / "checkpoints" / older.name)
    assert first["bytes"] == (_size(older) + _size(newer)) / 2
    assert _size(older) / 2 < second["bytes"] <= first["bytes"], "it stops at the fault"
    assert named["chosen"] == named_too["chosen"]
    assert "but this checkpoint is damaged" in named["chosen"]


@pytest.mark.slow
def test_another_runs_checkpoint_is_refused_on_both(run_job: RunJob, tmp_path: Path) -> None:
    output = tmp_path / "run"
    name = put_checkpoint(output / "checkpoints", 1, run_id="theirs").name
    (refused, any_run, anew) = _resume(run_job, output, "auto", "any", "never")
    assert refused[0] == refused[1]
    assert "is step=1.ckpt of run theirs, and this is run job-1" in refused[0]["chosen"]
    assert [each["chosen"] for each in any_run] == [str(output / "checkpoints" / name)] * 2
    assert [each["chosen"] for each in anew] == [None, None]
