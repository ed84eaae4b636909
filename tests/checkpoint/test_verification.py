"""Ranks that share the checking of a checkpoint, as threads of this process with a store in its memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.conftest import MakeCheckpoint
from torch.distributed import HashStore, Store

from azureml_strategy.checkpoint import manifest as manifest_module
from azureml_strategy.checkpoint import verification
from azureml_strategy.checkpoint.manifest import Manifest, OverdueError, StoredFile, content_fault, stored_file
from azureml_strategy.checkpoint.verification import Leader, NotVerifiedError, follow, shared_out, time_limit

RANKS = 3


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60), st.integers(1, 9))
def test_each_file_on_one_rank_and_about_as_many_bytes_on_each(sizes: list[int], ranks: int) -> None:
    files = {f"step=1.ckpt/{number}": StoredFile(size, 0) for number, size in enumerate(sizes)}
    shares = shared_out(files, range(ranks))
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
    monkeypatch.setattr(verification, "_ARRIVAL_SECONDS", 0.1)
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
    before = verification.content_fault

    def check(folder: Path, files: Any, deadline: float) -> str | None:
        if threading.current_thread() is threading.main_thread():
            job.store.wait(["0/verdict/1"])
        return before(folder, files)

    monkeypatch.setattr(verification, "content_fault", check)
    monkeypatch.setattr(verification, "time_limit", lambda files, shares: 1.0)
    monkeypatch.setattr(verification, "_FAREWELL_SECONDS", 0.1)
    manifest = make_checkpoint(1, shards=4)
    job = _Job({2: _silent})
    with pytest.raises(NotVerifiedError, match=r"step=1.ckpt is whole is not known: rank 2 has not checked its share"):
        job.leader.fault(manifest, tmp_path / "checkpoints")
    job.end()


def test_a_check_that_fails_is_said_to_all(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_checkpoint(1, shards=4)
    before = verification.content_fault

    def fail(*arguments: Any) -> str | None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no more")
        return before(*arguments)

    monkeypatch.setattr(verification, "content_fault", fail)
    job = _Job()
    with pytest.raises(NotVerifiedError, match=r"rank 1 has not checked its share \(MemoryError: no more\)"):
        job.leader.fault(manifest, tmp_path / "checkpoints")
    job.end()


def test_a_rank_0_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "MEETING_SECONDS", 0.1)
    with pytest.raises(NotVerifiedError, match="Rank 0, which chooses the checkpoint to go on from, has ended"):
        follow(HashStore(), 1)


def test_what_is_read_too_slowly_is_no_fault(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A slow mount must not cost a checkpoint."""
    manifest: Manifest = make_checkpoint(1)
    with pytest.raises(OverdueError, match="was not read in time"):
        content_fault(tmp_path / "checkpoints", manifest.files, deadline=0.0)
