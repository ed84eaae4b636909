from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.conftest import MakeCheckpoint

from azureml_strategy.checkpoint.folder import CheckpointFolder, newest_first, superfluous
from azureml_strategy.checkpoint.manifest import Manifest


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def _names(folder: CheckpointFolder) -> list[str]:
    return sorted(os.listdir(folder.path))


def test_a_name_that_is_taken_gets_a_number(make_checkpoint: MakeCheckpoint, folder: CheckpointFolder) -> None:
    assert [make_checkpoint(3).name for _ in range(3)] == ["step=3.ckpt", "step=3-v1.ckpt", "step=3-v2.ckpt"]
    assert len(folder.complete()) == 3


@pytest.mark.parametrize("shards", [0, 2])
def test_a_write_that_stopped_leaves_nothing_that_counts(
    make_checkpoint: MakeCheckpoint, folder: CheckpointFolder, shards: int
) -> None:
    make_checkpoint(1)
    name = folder.begin("step=2.ckpt")
    for part in [name + ".part", name] if not shards else [f"{name}/0.pt", f"{name}/1.pt"]:
        (folder.path / part).parent.mkdir(exist_ok=True)
        (folder.path / part).write_bytes(b"torn")
    (folder.path / (name + ".manifest.json.part")).write_text("{")
    assert [each.step for each in folder.complete()] == [1]
    assert folder.remove_leftovers() == ["step=2.ckpt"]
    assert _names(folder) == ["step=1.ckpt", "step=1.ckpt.manifest.json"]


def test_a_commit_that_stopped_before_its_last_line_counts(
    make_checkpoint: MakeCheckpoint, folder: CheckpointFolder
) -> None:
    (folder.path / (make_checkpoint(1).name + ".incomplete")).touch()
    assert folder.remove_leftovers() == []
    assert _names(folder) == ["step=1.ckpt", "step=1.ckpt.manifest.json"]


def test_a_removal_that_stopped_is_finished(
    make_checkpoint: MakeCheckpoint, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make_checkpoint(1, shards=2).name
    with monkeypatch.context() as broken:
        broken.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(OSError, match="gone"):
            folder.remove(name)
    assert folder.complete() == []
    assert folder.remove_leftovers() == [name]
    assert _names(folder) == []


def test_files_of_the_users_stay(make_checkpoint: MakeCheckpoint, folder: CheckpointFolder) -> None:
    make_checkpoint(1)
    (folder.path / "mine.ckpt").write_bytes(b"by hand")
    (folder.path / "last.ckpt").mkdir()
    folder.remove_leftovers()
    folder.remove("step=1.ckpt")
    assert _names(folder) == ["last.ckpt", "mine.ckpt"]


def _manifest(number: int, score: float | None) -> Manifest:
    return Manifest(f"{number}.ckpt", number, 0, float(-number), 1, "test", score, "max", {})


def _ranked(manifests: list[Manifest], mode: str) -> list[float]:
    scores = [each.score for each in manifests if each.score is not None and not math.isnan(each.score)]
    return sorted(scores, reverse=mode == "max")


@given(
    st.lists(st.none() | st.floats(allow_infinity=False), max_size=12),
    st.integers(1, 4),
    st.integers(-1, 3),
    st.sampled_from(["min", "max"]),
)
def test_the_newest_and_the_best_stay(scores: list[float | None], last: int, best: int, mode: str) -> None:
    complete = newest_first([_manifest(number, score) for number, score in enumerate(scores)])
    gone = {each.name for each in superfluous(complete, last, best, mode)}
    kept = [each for each in complete if each.name not in gone]
    assert kept[:last] == complete[:last]
    finite = [each for each in complete if each.score is not None and not math.isnan(each.score)]
    ranked = sorted((each.score for each in finite if each.score is not None), reverse=mode == "max")
    kept_scores = sorted(
        (each.score for each in kept if each.score is not None and each in finite), reverse=mode == "max"
    )
    wanted = len(ranked) if best < 0 else best
    assert kept_scores[:wanted] == ranked[:wanted]
    if best >= 0:
        assert len(kept) <= last + best
