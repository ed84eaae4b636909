"""Several Azure ML runs in one folder: none goes on from another, or removes what it wrote, unless it is told to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.conftest import MakeCheckpoint, put_checkpoint
from tests.multiprocess.scripts.noisy import Killed, StopAt, fit

from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.resume import ResumeError, checkpoint_to_resume

BY_STEP: dict[str, Any] = {"logger": False, "limit_val_batches": 0}


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything writes goes away again
        monkeypatch.setenv(name, "0")


def _be(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZUREML_RUN_ID", run_id)


def test_another_run_is_not_gone_on_from(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(1, run_id="mine")
    make_checkpoint(2, run_id="theirs")
    newest = tmp_path / "checkpoints" / "step=2.ckpt"
    _be("mine", monkeypatch)
    with pytest.raises(ResumeError) as refused:
        checkpoint_to_resume("auto", tmp_path)
    said = str(refused.value)
    assert f"The newest checkpoint in {tmp_path / 'checkpoints'} is step=2.ckpt of run theirs, and this is run" in said
    for words in ("run mine", "another output_dir", "`resume=any`", "`resume=PATH`", "`resume=never`"):
        assert words in said
    assert checkpoint_to_resume("any", tmp_path) == newest
    assert checkpoint_to_resume(str(newest), tmp_path) == newest
    assert checkpoint_to_resume("never", tmp_path) is None
    _be("theirs", monkeypatch)
    assert checkpoint_to_resume("auto", tmp_path) == newest


@pytest.mark.parametrize(("wrote", "reads"), [(None, "mine"), ("theirs", None), (None, None)])
def test_a_run_that_nobody_knows_is_no_other_run(
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrote: str | None,
    reads: str | None,
) -> None:
    make_checkpoint(1, run_id=wrote)
    if reads is not None:
        _be(reads, monkeypatch)
    assert checkpoint_to_resume("auto", tmp_path) == tmp_path / "checkpoints" / "step=1.ckpt"


def test_what_is_left_of_another_run_is_no_reason_to_refuse(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is there, and its files are not."""
    make_checkpoint(1, run_id="mine")
    make_checkpoint(2, run_id="theirs")
    (tmp_path / "checkpoints" / "step=2.ckpt").unlink()
    _be("mine", monkeypatch)
    assert checkpoint_to_resume("auto", tmp_path) == tmp_path / "checkpoints" / "step=1.ckpt"


def test_another_runs_checkpoints_neither_count_nor_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken over or not."""
    checkpoints = tmp_path / "checkpoints"
    for step in (100, 200, 300):
        put_checkpoint(checkpoints, step, score=0.0, run_id="theirs")
    CheckpointFolder(checkpoints, "theirs").begin("under way.ckpt")
    (checkpoints / "under way.ckpt").write_bytes(b"half")
    before = {path: path.read_bytes() for path in checkpoints.iterdir()}
    _be("mine", monkeypatch)
    monkeypatch.setenv("AZUREML_STRATEGY_RESUME", "")  # as after `resume=never`
    with pytest.raises(Killed):
        fit(tmp_path, StopAt(15), **BY_STEP, checkpoint={"monitor": None})
    assert {path: path.read_bytes() for path in before} == before
    mine = CheckpointFolder(checkpoints, "mine").own()
    assert [(each.step, each.attempt, each.run_id) for each in mine] == [(6, 2, "mine"), (4, 2, "mine")]
    assert len(os.listdir(checkpoints)) == len(before) + 4


def test_what_a_run_left_half_written_is_removed_by_itself(tmp_path: Path) -> None:
    for run_id in ("mine", "theirs", None):
        name = CheckpointFolder(tmp_path, run_id).begin(f"of {run_id}.ckpt")
        (tmp_path / name).write_bytes(b"half")
    assert CheckpointFolder(tmp_path, "mine").remove_leftovers() == ["of mine.ckpt"]
    assert CheckpointFolder(tmp_path).remove_leftovers() == ["of None.ckpt"]
    assert sorted(os.listdir(tmp_path)) == ["of theirs.ckpt", "of theirs.ckpt.incomplete"]
