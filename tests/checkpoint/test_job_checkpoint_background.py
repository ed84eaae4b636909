"""A checkpoint is written while training goes on, or training waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from tests.checkpoint.saving import IN_BACKGROUND, QUICK, SaveNow
from tests.multiprocess.scripts.noisy import Killed, StopAt, fit

from azureml_strategy.checkpoint.checkpoint_io import AtomicCheckpointIO
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.writer import BackgroundWriter

pytestmark = pytest.mark.usefixtures("seeded")


class _Held(AtomicCheckpointIO):
    """A disk that takes a file only when it is let, and knows on which thread it came."""

    def __init__(self, refused: str = "none") -> None:
        self.came, self.free = threading.Event(), threading.Event()
        self.threads: list[str] = []
        self.refused = refused

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.threads.append(threading.current_thread().name)
        self.came.set()
        assert self.free.wait(60)
        if self.refused in str(path):
            raise OSError("the disk is gone")
        super().save_checkpoint(checkpoint, path, storage_options)


class _At(Callback):
    """Does something at the start of the batch of a number."""

    def __init__(self, batch: int, act: Callable[[], object]) -> None:
        self.batch, self.act = batch, act

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            self.act()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", **QUICK, checkpoint={**IN_BACKGROUND, "asynchronous": False})
    disk, folder = _Held(), CheckpointFolder(tmp_path / "run" / "checkpoints")
    seen: list[Any] = []
    look = _At(14, lambda: seen.append((disk.came.wait(60), folder.complete(), list(disk.threads))))
    behind = fit(
        tmp_path / "run", look, _At(15, disk.free.set), plugins=[disk], **QUICK, checkpoint=dict(IN_BACKGROUND)
    )
    assert seen == [(True, [], ["checkpoint-writer"])], "three steps later the first one was still being written"
    assert [each.step for each in folder.complete()] == [15, 12]
    assert behind["weights"] == whole["weights"]
    assert set(disk.threads) == {"checkpoint-writer"}


def test_training_that_is_to_wait_writes_on_its_own_thread(tmp_path: Path) -> None:
    disk = _Held()
    disk.free.set()
    fit(tmp_path / "run", plugins=[disk], **QUICK, checkpoint={**IN_BACKGROUND, "asynchronous": False})
    assert set(disk.threads) == {"MainThread"}


def test_the_next_one_waits_for_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes nothing before the second one is due: that has to wait, and only then begins."""
    disk = _Held()
    finish = BackgroundWriter.finish

    def finish_and_let(writer: BackgroundWriter) -> Any:
        if writer.under_way:
            assert disk.came.wait(60)
            assert len(disk.threads) == 1 or disk.free.is_set()
            disk.free.set()
        return finish(writer)

    monkeypatch.setattr(BackgroundWriter, "finish", finish_and_let)
    fit(tmp_path / "run", plugins=[disk], **QUICK, checkpoint=dict(IN_BACKGROUND))
    assert [each.step for each in CheckpointFolder(tmp_path / "run" / "checkpoints").complete()] == [15, 12]


def test_one_that_was_being_written_when_training_failed_is_complete(tmp_path: Path) -> None:
    disk = _Held()
    with pytest.raises(Killed):
        fit(
            tmp_path / "run",
            _At(10, disk.free.set),
            StopAt(10),
            plugins=[disk],
            **QUICK,
            checkpoint=dict(IN_BACKGROUND),
        )
    assert [each.step for each in CheckpointFolder(tmp_path / "run" / "checkpoints").complete()] == [4]


def test_a_disk_that_fails_behind_the_training_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, folder = _Held(refused="step=8"), CheckpointFolder(tmp_path / "run" / "checkpoints")
    disk.free.set()
    fit(tmp_path / "run", plugins=[disk], **QUICK, checkpoint=dict(IN_BACKGROUND))
    assert "No checkpoint at step 8: the disk is gone. Training goes on" in caplog.text
    assert [each.step for each in folder.complete()] == [15, 12]
    assert len(list(folder.path.iterdir())) == 4, "nothing of the one that failed is left"


def test_save_now_is_complete_though_another_was_being_written(tmp_path: Path) -> None:
    disk, asked = _Held(), SaveNow()
    threading.Timer(0.3, disk.free.set).start()  # the seventh step waits for it
    fit(tmp_path / "run", asked, plugins=[disk], **QUICK, checkpoint={**IN_BACKGROUND, "keep_last": 9})
    assert [Path(path or "").name for path in asked.paths] == ["epoch=0-step=7.ckpt"] * 2
    assert [each.step for each in CheckpointFolder(tmp_path / "run" / "checkpoints").complete()] == [15, 12, 8, 7, 4]


class _Unsharded(SingleDeviceStrategy):
    """A strategy with its own way to save, of which nothing is known."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self.thread = threading.current_thread().name
        super().save_checkpoint(checkpoint, filepath, storage_options)


def test_a_strategy_with_its_own_way_to_save_is_waited_for(tmp_path: Path) -> None:
    strategy = _Unsharded(torch.device("cpu"))
    fit(tmp_path / "run", strategy=strategy, **QUICK, checkpoint=dict(IN_BACKGROUND))
    assert strategy.thread == "MainThread"
    assert [each.step for each in CheckpointFolder(tmp_path / "run" / "checkpoints").complete()] == [15, 12]
