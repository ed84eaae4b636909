"""A disk that is full, loses bytes or takes nothing, and what cannot be written at all."""

from __future__ import annotations

import os
import re
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from tests.checkpoint.saving import IN_BACKGROUND, QUICK, QUIET, copied
from tests.multiprocess.scripts.noisy import Noisy, Numbers, fit

from azureml_strategy.checkpoint import JobCheckpoint, checkpoint_io
from azureml_strategy.checkpoint.checkpoint_io import AtomicCheckpointIO
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.manifest import stored_file
from azureml_strategy.checkpoint.serialization import UnsavableStateError

pytestmark = pytest.mark.usefixtures("seeded")


class _Refuse(Callback):
    """From a batch on, the disk takes only the smallest files, as a full one does; later it takes all again."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        seen = trainer.fit_loop.epoch_loop.total_batch_idx
        if seen in (self.first, self.last):
            size = 3000 if seen == self.first else self.limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.limits[1]))


@pytest.mark.filterwarnings("ignore:No checkpoint at step")
def test_a_full_disk_costs_a_warning_and_no_older_checkpoint(tmp_path: Path) -> None:
    checkpoint = {"monitor": None, "every_n_train_steps": 4, "asynchronous": False}  # what the disk takes, and when
    quiet = {"logger": False, "limit_val_batches": 0, "checkpoint": checkpoint}
    whole = fit(tmp_path / "whole", **copied(quiet))
    folder = CheckpointFolder(tmp_path / "full" / "checkpoints")
    seen: list[list[int]] = []
    refuse = _Refuse(20, 50)
    with pytest.warns(UserWarning, match=r"No checkpoint at step 12: .*older checkpoints are as they were"):
        full = fit(tmp_path / "full", refuse, _Look(folder, seen), **copied(quiet))
    assert full["weights"] == whole["weights"]
    assert seen[24:48] == [[8, 4]] * 24, "the disk is full"
    assert folder.complete()[0].step == 30
    assert all(each.fault(folder.path) is None for each in folder.complete())
    assert len(list(folder.path.iterdir())) == 4


class _Look(Callback):
    """Notes at each batch which checkpoints there are."""

    def __init__(self, folder: CheckpointFolder, seen: list[list[int]]) -> None:
        self.folder, self.seen = folder, seen

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.seen.append([each.step for each in self.folder.complete()])


@pytest.mark.filterwarnings("ignore:No checkpoint at step")
def test_a_disk_too_small_for_another_one_is_seen_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointFolder, "free_bytes", lambda folder: 1000)
    with pytest.warns(UserWarning, match=r"No checkpoint at step 4: the disk has 1,000 bytes left, and it takes about"):
        fit(tmp_path / "run", logger=False, max_epochs=1, checkpoint={"asynchronous": False})
    assert [each.step for each in CheckpointFolder(tmp_path / "run" / "checkpoints").complete()] == [2]


@pytest.mark.filterwarnings("ignore:No checkpoint at step")
def test_a_place_that_cannot_be_written_to_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where the folder should be")
    saver = JobCheckpoint(tmp_path / "run" / "checkpoints", every_n_train_steps=5, asynchronous=False)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, callbacks=[saver], **QUIET)
    with pytest.warns(UserWarning, match="No checkpoint at step 5"):
        trainer.fit(Noisy(), datamodule=Numbers())
    assert trainer.global_step == 30


class _Sealed(AtomicCheckpointIO):
    """Changes the file after it was written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        content = bytearray(Path(path).read_bytes())
        content[-1] ^= 1
        Path(path).write_bytes(content)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("disk", [AtomicCheckpointIO, _Sealed])
def test_manifests_say_what_lies_there(tmp_path: Path, disk: type[AtomicCheckpointIO], asynchronous: bool) -> None:
    fit(tmp_path, plugins=[disk()], **QUICK, checkpoint={**IN_BACKGROUND, "asynchronous": asynchronous})
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert [each.step for each in folder.complete()] == [15, 12]
    for manifest in folder.complete():
        assert manifest.files == {manifest.name: stored_file(folder.path / manifest.name)}


def test_a_file_that_lost_its_end_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(folder: Path) -> None:
        for file in folder.glob("*step=8*.ckpt"):
            os.truncate(file, 100)

    monkeypatch.setattr(checkpoint_io, "sync_folder", lose)
    fit(tmp_path, **QUICK, checkpoint=dict(IN_BACKGROUND))
    assert re.search(r"No checkpoint at step 8: .* has 100 bytes, and [\d,]+ were written\. Training", caplog.text)
    assert [each.step for each in CheckpointFolder(tmp_path / "checkpoints").complete()] == [15, 12]


class _WritesNothing(AtomicCheckpointIO):
    def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        return


class _Unpicklable(Callback):
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["lock"] = threading.Lock()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_cannot_be_saved_ends_the_training_at_its_first_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    with pytest.raises(UnsavableStateError, match="No checkpoint can be written: lock is a "):
        fit(tmp_path, _Unpicklable(), max_epochs=1, checkpoint={"asynchronous": asynchronous})


@pytest.mark.filterwarnings("ignore:No checkpoint at step")
def test_a_checkpoint_without_files_does_not_count(tmp_path: Path) -> None:
    saver = JobCheckpoint(tmp_path, every_n_train_steps=5, every_n_epochs=0, asynchronous=False)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, callbacks=[saver], plugins=[_WritesNothing()], **QUIET
    )
    with pytest.warns(UserWarning, match="No checkpoint at step 5: nothing was written"):
        trainer.fit(Noisy(), datamodule=Numbers())
    assert not list(tmp_path.iterdir())
