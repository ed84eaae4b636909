"""Writing a checkpoint into a folder, and what may go afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoint.conftest import MakeCheckpoint, put_checkpoint, put_new
from torch.distributed import HashStore

from azureml_strategy.checkpoint.exchange import StoreExchange
from azureml_strategy.checkpoint.manifest import Manifest
from azureml_strategy.checkpoint.storage_folder import CheckpointFolder
from azureml_strategy.checkpoint.storage_write import CheckpointWriter, Written


def write(folder: CheckpointFolder, step: int) -> Written | None:
    """As a training of one rank does it."""
    draft = Manifest(f"step={step}.ckpt", step, 0, float(step), 1, "test", 0.5, "min", {})
    writer = CheckpointWriter(folder, keep_last=1, keep_best=0)
    return writer.write(draft, put_new, StoreExchange(HashStore(), 0, 1))


def test_what_was_just_written_stays_whatever_the_order_says(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (8, 9):
        make_checkpoint(step, attempt=7, saved_at=4e9)
    assert write(folder, 1) is not None
    assert [each.step for each in folder.complete()] == [9, 1]


class _NotListed(CheckpointFolder):
    """A folder that can be written to, and cannot be listed any more once something was."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.listed = True

    def commit(self, manifest: Manifest) -> Manifest:
        self.listed = False
        return super().commit(manifest)

    def complete(self) -> list[Manifest]:
        if not self.listed:
            raise OSError("Stale file handle")
        return super().complete()


def test_a_folder_that_cannot_be_looked_through_costs_a_warning_not_the_checkpoint(tmp_path: Path) -> None:
    put_checkpoint(tmp_path, 1)
    with pytest.warns(UserWarning, match=r"Older checkpoints in .* cannot be looked through: .*Stale file handle"):
        written = write(_NotListed(tmp_path), 5)
    assert written is not None
    assert written.scores == {}
    assert [each.step for each in CheckpointFolder(tmp_path).complete()] == [5, 1]


def test_one_that_cannot_be_deleted_costs_a_warning(tmp_path: Path) -> None:
    put_checkpoint(tmp_path, 1)
    (tmp_path / "step=1.ckpt.incomplete" / "in the way").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"Older checkpoints in .* cannot be deleted"):
        assert write(CheckpointFolder(tmp_path), 5) is not None
    assert [each.step for each in CheckpointFolder(tmp_path).complete()] == [5, 1]


def test_a_name_that_would_not_be_read_is_not_written(tmp_path: Path) -> None:
    draft = Manifest("step=1.part", 1, 0, 0.0, 1, "test", None, "min", {})
    writer = CheckpointWriter(CheckpointFolder(tmp_path), 1, 0)
    with pytest.warns(UserWarning, match=r"'step=1.part' is no name for a checkpoint: give a `filename`"):
        writer.write(draft, put_new, StoreExchange(HashStore(), 0, 1))
    assert list(tmp_path.iterdir()) == []
