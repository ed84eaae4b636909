from __future__ import annotations

import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.conftest import MakeCheckpoint
from tests.emulated import free_port
from torch.distributed import HashStore, Store

from azureml_strategy.checkpoint import manifest as manifest_module
from azureml_strategy.checkpoint import resume
from azureml_strategy.checkpoint.manifest import (
    Manifest,
    OverdueError,
    StoredFile,
    content_fault,
    manifest_path,
    stored_file,
)
from azureml_strategy.checkpoint.resume import (
    Leader,
    NotVerifiedError,
    ResumeError,
    checkpoint_to_resume,
    children_resume_from,
    distribute_files,
    follow,
    newest_valid,
    time_limit,
)
from azureml_strategy.cluster import Launch

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

RANKS = 3


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60), st.integers(1, 9))
def test_each_file_on_one_rank_and_about_as_many_bytes_on_each(sizes: list[int], ranks: int) -> None:
    files = {f"step=1.ckpt/{number}": StoredFile(size, 0) for number, size in enumerate(sizes)}
    shares = distribute_files(files, range(ranks))
    assert sorted(name for share in shares.values() for name in share) == sorted(files)
    loads = [sum(files[name].size for name in share) for share in shares.values()]
    assert max(loads) - min(loads) <= max(sizes) + len(sizes), "no rank could give one away and all be better off"
    assert time_limit(files, shares) == 600 + max(loads) / 10e6


class _Job:
    """Rank 0 on this thread, and the others on theirs."""

    def __init__(self, followers: dict[int, Any] | None = None) -> None:
        self.store = HashStore()
        self._threads = ThreadPoolExecutor(RANKS)
        work = dict.fromkeys(range(1, RANKS), follow) | (followers or {})
        self.answers = {rank: self._threads.submit(work[rank], self.store, rank) for rank in work if work[rank]}
        self.leader = Leader(self.store, RANKS)

    def end(self) -> list[dict[str, Any]]:
        self.leader.end({"path": "chosen"}, stay=True)
        self._threads.shutdown()
        return [answer.result() for answer in self.answers.values()]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose content was read."""
    names: list[str] = []

    def noted(path: Path, *arguments: float) -> StoredFile:
        names.append(path.name)
        return stored_file(path, *arguments)

    monkeypatch.setattr(manifest_module, "stored_file", noted)
    return names


def test_each_file_is_read_once(make_checkpoint: MakeCheckpoint, tmp_path: Path, read: list[str]) -> None:
    manifest = make_checkpoint(1, shards=8)
    read.clear()
    job = _Job()
    assert job.leader.fault(manifest, tmp_path / "checkpoints") is None
    assert job.end() == [{"path": "chosen"}] * 2
    assert sorted(read) == [f"{shard}.pt" for shard in range(8)]


@pytest.mark.parametrize("shard", range(4))
def test_a_fault_that_any_rank_finds(make_checkpoint: MakeCheckpoint, tmp_path: Path, shard: int) -> None:
    folder = tmp_path / "checkpoints"
    older, newer = make_checkpoint(1, shards=4), make_checkpoint(2, shards=4)
    path = folder / newer.name / "inner" / f"{shard}.pt"
    path.write_bytes(b"W" + path.read_bytes()[1:])
    job = _Job()
    assert job.leader.fault(newer, folder) == f"{newer.name}/inner/{shard}.pt has other bytes than were written"
    assert job.leader.fault(older, folder) is None, "the next round"
    assert job.end() == [{"path": "chosen"}] * 2


def test_a_rank_that_has_not_come_takes_no_share(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_ARRIVAL_SECONDS", 0.1)
    manifest = make_checkpoint(1, shards=4)
    job = _Job({2: None})
    assert job.leader.fault(manifest, tmp_path / "checkpoints") is None
    with ThreadPoolExecutor(1) as late:
        answer = late.submit(follow, job.store, 2)
        assert job.end() == [{"path": "chosen"}]
        assert answer.result() == {"path": "chosen"}


def _silent(store: Store, rank: int) -> None:
    """Sees the files, and ends."""
    store.wait(["0/order"])
    store.set(f"0/sees/{rank}", "true")


def test_a_rank_that_ends_in_the_middle_holds_nobody_up_without_end(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has its own share checked when rank 1 has: then only rank 2 is out."""
    before = resume.content_fault

    def check(folder: Path, files: Any, deadline: float) -> str | None:
        if threading.current_thread() is threading.main_thread():
            job.store.wait(["0/verdict/1"])
        return before(folder, files)

    monkeypatch.setattr(resume, "content_fault", check)
    monkeypatch.setattr(resume, "time_limit", lambda files, shares: 1.0)
    monkeypatch.setattr(resume, "_LAST_READ_SECONDS", 0.1)
    manifest = make_checkpoint(1, shards=4)
    job = _Job({2: _silent})
    with pytest.raises(NotVerifiedError, match=r"step=1.ckpt is whole is not known: rank 2 has not checked its share"):
        job.leader.fault(manifest, tmp_path / "checkpoints")
    job.end()


def test_a_check_that_fails_is_said_to_all(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_checkpoint(1, shards=4)
    before = resume.content_fault

    def fail(*arguments: Any) -> str | None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no more")
        return before(*arguments)

    monkeypatch.setattr(resume, "content_fault", fail)
    job = _Job()
    with pytest.raises(NotVerifiedError, match=r"rank 1 has not checked its share \(MemoryError: no more\)"):
        job.leader.fault(manifest, tmp_path / "checkpoints")
    job.end()


def test_a_rank_0_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MEETING_SECONDS", 0.1)
    with pytest.raises(NotVerifiedError, match="Rank 0, which chooses the checkpoint to go on from, has ended"):
        follow(HashStore(), 1)


def test_what_is_read_too_slowly_is_no_fault(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A slow mount must not cost a checkpoint."""
    manifest: Manifest = make_checkpoint(1)
    with pytest.raises(OverdueError, match="was not read in time"):
        content_fault(tmp_path / "checkpoints", manifest.files, deadline=0.0)


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
    with children_resume_from(_path(tmp_path, 1)):
        make_checkpoint(2)
        assert checkpoint_to_resume("auto", tmp_path) == _path(tmp_path, 1)
        with children_resume_from(_path(tmp_path, 1)):
            pass
        assert "AZUREML_STRATEGY_RESUME" in os.environ
    with children_resume_from(None):
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
            self.found[rank] = resume._choose_before_group(launch, "auto", self.folders[rank])
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
