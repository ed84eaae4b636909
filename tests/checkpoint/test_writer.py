from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from tests.checkpoint.conftest import MakeCheckpoint, put_checkpoint, put_new
from tests.control.stores import shared

from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.manifest import Manifest
from azureml_strategy.checkpoint.writer import BackgroundTask, CheckpointWriter, Written
from azureml_strategy.control.gather import StoreExchange


def test_it_is_done_on_another_thread_and_waited_for() -> None:
    behind, go = BackgroundTask[str]("tester"), threading.Event()

    def work() -> str:
        go.wait()
        return threading.current_thread().name

    behind.begin(work)
    assert behind.busy
    go.set()
    assert behind.finish() == "tester"
    assert not behind.busy
    assert behind.finish() is None, "nothing else was begun"


def test_one_at_a_time() -> None:
    behind, go = BackgroundTask[None]("tester"), threading.Event()
    behind.begin(lambda: (go.wait(), None)[1])
    with pytest.raises(AssertionError, match="one at a time"):
        behind.begin(lambda: None)
    go.set()
    behind.finish()


def test_a_wait_that_is_interrupted_can_be_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    behind, go = BackgroundTask[int]("tester"), threading.Event()
    behind.begin(lambda: (go.wait(), 3)[1])
    with monkeypatch.context() as interrupted:
        interrupted.setattr(threading.Thread, "join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            behind.finish()
    go.set()
    assert behind.finish() == 3


def test_a_failure_is_logged_and_gives_nothing(caplog: pytest.LogCaptureFixture) -> None:
    behind = BackgroundTask[int]("tester")
    with caplog.at_level(logging.WARNING):
        behind.begin(lambda: 1 // 0)
        assert behind.finish() is None
    assert "tester: ZeroDivisionError" in caplog.text
    behind.begin(lambda: 3)
    assert behind.finish() == 3


def test_what_takes_too_long_is_left_behind() -> None:
    behind, go = BackgroundTask[int]("tester"), threading.Event()
    behind.begin(lambda: int(go.wait()))
    assert behind.finish(timeout_s=0.01) is None
    go.set()


def write(folder: CheckpointFolder, step: int) -> Written | None:
    """As a training of one rank does it."""
    draft = Manifest(f"step={step}.ckpt", step, 0, float(step), 1, "test", 0.5, "min", {})
    writer = CheckpointWriter(folder, keep_last=1, keep_best=0)
    return writer.write(draft, put_new, StoreExchange(shared(1)[0]))


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
        writer.write(draft, put_new, StoreExchange(shared(1)[0]))
    assert list(tmp_path.iterdir()) == []
