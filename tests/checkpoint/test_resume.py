from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import pytest
from tests.checkpoint.conftest import MakeCheckpoint
from tests.emulated import free_port

from azureml_strategy.checkpoint import resume
from azureml_strategy.checkpoint.manifest import manifest_path
from azureml_strategy.checkpoint.resume import ResumeError, checkpoint_to_resume, newest_valid, told_to_children
from azureml_strategy.cluster import Launch


def _path(tmp_path: Path, step: int) -> Path:
    return tmp_path / "checkpoints" / f"step={step}.ckpt"


def test_the_newest_that_is_whole(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3, 4, 5):
        make_checkpoint(step, shards=2 if step == 4 else 0)
    _path(tmp_path, 5).write_bytes(b"torn")
    (_path(tmp_path, 4) / "inner" / "1.pt").unlink()
    manifest_path(_path(tmp_path, 3)).write_text("{")
    with caplog.at_level(logging.INFO, "azureml_strategy"):
        assert newest_valid(tmp_path) == _path(tmp_path, 2)
    said = "\n".join(caplog.messages)
    for words in ("step=5.ckpt has 4 of", "inner/1.pt is missing", "step=3.ckpt.manifest.json is left out"):
        assert said.count(words) == 1
    assert caplog.messages[-1] == f"Going on from {_path(tmp_path, 2)}: step 2."


def test_newest_by_attempt_and_not_by_step_or_clock(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """After `resume=never` a run has fewer steps than what it found."""
    make_checkpoint(900, saved_at=20.0, attempt=1)
    make_checkpoint(5, saved_at=10.0, attempt=2)
    assert newest_valid(tmp_path) == _path(tmp_path, 5)


def test_nothing_there_is_a_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoint_to_resume("auto", tmp_path / "not made yet") is None
    assert not caplog.messages


def test_nothing_whole_is_a_start_that_is_said(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(1)
    _path(tmp_path, 1).unlink()
    assert checkpoint_to_resume("auto", tmp_path) is None
    assert "None of the 1 checkpoint(s)" in caplog.text


def test_never_and_a_path(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    make_checkpoint(1)
    make_checkpoint(2)
    assert checkpoint_to_resume("never", tmp_path) is None
    assert checkpoint_to_resume(str(_path(tmp_path, 1)), tmp_path) == _path(tmp_path, 1)
    foreign = tmp_path / "of_stock_lightning.ckpt"
    foreign.write_bytes(b"\x80\x02 a pickle")
    assert checkpoint_to_resume(str(foreign), tmp_path) == foreign


def test_one_of_version_1_is_taken_when_it_is_named(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(1)
    path = manifest_path(_path(tmp_path, make_checkpoint(2).step))
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: content[key] for key in ("name", "step", "files")} | {"version": 1}, indent=1))
    assert checkpoint_to_resume("auto", tmp_path) == _path(tmp_path, 1)
    assert "is of version 1, and this is version 2; `resume=PATH` takes what it lists unchecked" in caplog.text
    assert checkpoint_to_resume(str(_path(tmp_path, 2)), tmp_path) == _path(tmp_path, 2)
    path.write_text(path.read_text().replace('"version": 1', '"version": 3'))
    with pytest.raises(ResumeError, match=r"its manifest cannot be read: step=2.ckpt.manifest.json is damaged"):
        checkpoint_to_resume(str(_path(tmp_path, 2)), tmp_path)


def test_a_path_that_cannot_be(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"resume=.*gone.ckpt, but there is nothing.*`resume=auto`"):
        checkpoint_to_resume(str(tmp_path / "gone.ckpt"), tmp_path)
    make_checkpoint(1)
    _path(tmp_path, 1).write_bytes(b"torn")
    with pytest.raises(ResumeError, match=r"this checkpoint is damaged: step=1.ckpt has 4 of"):
        checkpoint_to_resume(str(_path(tmp_path, 1)), tmp_path)


def test_a_strategys_processes_are_told(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    make_checkpoint(1)
    with told_to_children(_path(tmp_path, 1)):
        make_checkpoint(2)
        assert checkpoint_to_resume("auto", tmp_path) == _path(tmp_path, 1)
        with told_to_children(_path(tmp_path, 1)):
            pass
        assert "AZUREML_STRATEGY_RESUME" in os.environ
    with told_to_children(None):
        assert checkpoint_to_resume("auto", tmp_path) is None
    assert checkpoint_to_resume("auto", tmp_path) == _path(tmp_path, 2)


class _Ranks:
    """Two ranks as threads of this process, each with the folder that its node shows it."""

    def __init__(self, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        self.port, self.folders = free_port(), folders
        self.found: dict[int, Path | Exception | None] = {}
        monkeypatch.setattr(resume, "_choices", iter([0, 0]))

    def run(self) -> list[Path | Exception | None]:
        threads = [threading.Thread(target=self._choose, args=(rank,)) for rank in (0, 1)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(200)
        resume._kept_open.clear()
        return [self.found[0], self.found[1]]

    def _choose(self, rank: int) -> None:
        launch = Launch("pytorch", rank, 2, 0, 1, rank, 2, "127.0.0.1", self.port)
        try:
            self.found[rank] = resume._agreed(launch, "auto", self.folders[rank])
        except ResumeError as error:
            self.found[rank] = error


def test_all_ranks_take_the_choice_of_rank_0(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(1)
    empty = tmp_path / "a mount that shows nothing yet"
    assert _Ranks([tmp_path, empty], monkeypatch).run() == [_path(tmp_path, 1)] * 2
    assert _Ranks([empty, tmp_path], monkeypatch).run() == [None, None]


def test_a_rank_waits_until_its_mount_shows_the_files(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(1)
    manifest = manifest_path(_path(tmp_path, 1))
    hidden = manifest.rename(tmp_path / "hidden")
    monkeypatch.setattr(resume, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(resume, "_VISIBLE_SECONDS", 0.1)
    with pytest.raises(ResumeError, match=r"rank 3 does not see it: its manifest is missing\. All nodes need the same"):
        resume._visible(_path(tmp_path, 1), 3)
    monkeypatch.setattr(resume, "_VISIBLE_SECONDS", 200)
    later = threading.Timer(0.1, hidden.rename, [manifest])
    later.start()
    assert resume._visible(_path(tmp_path, 1), 3) == _path(tmp_path, 1)
    later.join()
