"""What a bad disk or a stranger can put into a folder of checkpoints: nothing of it counts, crashes or costs a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.checkpoint.conftest import MakeCheckpoint, forge, put_checkpoint, put_new
from tests.control.stores import shared

from azureml_strategy.checkpoint.folder import CheckpointFolder, by_score, superfluous
from azureml_strategy.checkpoint.manifest import Manifest, manifest_path
from azureml_strategy.checkpoint.resume import newest_valid
from azureml_strategy.checkpoint.writer import CheckpointWriter
from azureml_strategy.control.gather import StoreExchange


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def _write(folder: Path, step: int = 50, keep_last: int = 1) -> None:
    """What a training does with each checkpoint: write it, and remove the superfluous ones."""
    writer = CheckpointWriter(CheckpointFolder(folder), keep_last=keep_last, keep_best=0)
    draft = Manifest(f"step={step}.ckpt", step, 0, float(step), 1, "test", None, "min", {})
    written = writer.write(draft, put_new, StoreExchange(shared(1)[0]))
    assert written is not None


def _accepted(manifest: Path) -> bool:
    try:
        return Manifest.read(manifest).fault(manifest.parent) is None
    except (ValueError, OSError):
        return False


@pytest.mark.parametrize("shards", [0, 3])
def test_each_flipped_bit_is_found(make_checkpoint: MakeCheckpoint, folder: Path, shards: int) -> None:
    path = manifest_path(folder / make_checkpoint(7, score=1e-07, shards=shards).name)
    whole = path.read_bytes()
    assert _accepted(path)
    accepted = []
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        if _accepted(path):
            accepted.append(bit)
    assert accepted == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["..", ".", "min", "a/b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("size"), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = sorted({"version", "attempt", "run_id", "crc32", *Manifest.__dataclass_fields__})


def _use(folder: Path) -> None:
    """All that is done with a folder's manifests: none of it may fail, whatever they say."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    complete = checkpoints.complete()
    by_score(complete, "min")
    superfluous(complete, 1, 2, "max")
    checkpoints.newer_than(checkpoints.path / "step=1.ckpt")
    checkpoints.remove_leftovers()
    newest_valid(folder)
    _write(checkpoints.path, keep_last=3)


@given(st.sampled_from(_FIELDS), _JSON)
def test_no_value_of_any_field_crashes_anything(field: str, value: Any) -> None:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoints"
        path = manifest_path(folder / put_checkpoint(folder, 1, score=0.5).name)
        put_checkpoint(folder, 2)
        forge(path, **{field: value})
        _use(folder.parent)
        assert (folder / "step=1.ckpt").exists()


@given(st.sampled_from(["size", "crc32", "name", "more"]), _JSON)
@example("size", 1 << 60)  # more than the disk has left
def test_no_value_about_a_file_crashes_anything(field: str, value: Any) -> None:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoints"
        path = manifest_path(folder / put_checkpoint(folder, 1).name)
        stored = json.loads(path.read_text())["files"]["step=1.ckpt"]
        files = {str(value): stored} if field == "name" else {"step=1.ckpt": {**stored, field: value}}
        forge(path, files=files)
        _use(folder.parent)


@pytest.mark.parametrize(
    "fields",
    [
        {"saved_at": "late"},
        {"saved_at": None},
        {"step": "7"},
        {"step": True},
        {"step": -1},
        {"score": "good"},
        {"score": 1},
        {"files": {}},
        {"files": None},
        {"files": {"other.ckpt": {"size": 1, "crc32": 1}}},
        {"files": {"step=1.ckpt/../other": {"size": 1, "crc32": 1}}},
        {"files": {"step=1.ckpt": {"size": 1.0, "crc32": 1}}},
        {"files": {"step=1.ckpt": {"size": 1, "crc32": 1 << 32}}},
        {"mode": "best"},
        {"global_batch": {"batch_size": 2}},
        {"more": 1},
    ],
)
def test_what_is_not_as_we_write_it_does_not_count(
    make_checkpoint: MakeCheckpoint, folder: Path, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(1)
    forge(manifest_path(folder / make_checkpoint(2).name), **fields)
    forge(manifest_path(folder / "step=1.ckpt"), name="step=1.ckpt")  # forging alone does no harm
    path = manifest_path(folder / "step=1.ckpt")
    path.write_text(path.read_text())
    assert [each.step for each in CheckpointFolder(folder).complete()] == [1]
    assert newest_valid(folder.parent) == folder / "step=1.ckpt"
    assert sum("step=2.ckpt.manifest.json is left out" in line for line in caplog.messages) == 1


def test_a_manifest_under_another_name_does_not_count(make_checkpoint: MakeCheckpoint, folder: Path) -> None:
    path = manifest_path(folder / make_checkpoint(1).name)
    path.with_name("step=2.ckpt.manifest.json").write_bytes(path.read_bytes())
    assert [each.name for each in CheckpointFolder(folder).complete()] == ["step=1.ckpt"]


def test_what_is_nested_without_end_is_no_manifest(make_checkpoint: MakeCheckpoint, folder: Path) -> None:
    make_checkpoint(1)
    (folder / "deep.ckpt.manifest.json").write_text("[" * 100_000)
    (folder / "folder.ckpt.manifest.json").mkdir()
    os.mkfifo(folder / "pipe.ckpt.manifest.json")
    assert newest_valid(folder.parent) == folder / "step=1.ckpt"


_OUTSIDE: dict[str, Callable[[Path], str]] = {
    "beside the folder": lambda precious: f"../{precious.name}",
    "absolute": str,
    "the folder": lambda precious: ".",
    "nothing": lambda precious: "",
    "the folder above": lambda precious: "..",
    "a detour": lambda precious: f"step=1.ckpt/../../{precious.name}",
}


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """What is of value to somebody, and none of ours."""
    path = tmp_path / "precious"
    path.mkdir()
    (path / "thesis.tex").write_text("years")
    return path


@pytest.mark.parametrize("name", _OUTSIDE)
def test_nothing_outside_is_removed_at_the_next_checkpoint(
    make_checkpoint: MakeCheckpoint, folder: Path, precious: Path, name: str
) -> None:
    given, stored = _OUTSIDE[name](precious), {"size": 5, "crc32": 1}
    path = manifest_path(folder / make_checkpoint(1).name)
    forge(path, name=given, files={given: stored})
    forge(path, path.with_name("0.ckpt.manifest.json"))
    for step in (60, 70):
        _write(folder, step)
    assert (precious / "thesis.tex").exists()
    assert (folder / "step=1.ckpt").exists()
    assert (folder / "step=70.ckpt").exists()


@pytest.mark.parametrize("mark", ["", ".", "..", "step=1.ckpt.manifest.json"])
def test_a_mark_of_a_strange_name_removes_nothing(make_checkpoint: MakeCheckpoint, folder: Path, mark: str) -> None:
    make_checkpoint(1)
    (folder.parent / "precious").touch()
    (folder / f"{mark}.incomplete").touch()
    assert CheckpointFolder(folder).remove_leftovers() == []
    assert (folder / "step=1.ckpt.manifest.json").exists()
    assert (folder / "step=1.ckpt").exists()
    assert (folder.parent / "precious").exists()


def test_links_out_of_the_folder_are_not_followed(folder: Path, precious: Path) -> None:
    put_checkpoint(folder, 1)
    for name in ("folder.ckpt", "file.ckpt"):
        (folder / (name + ".incomplete")).touch()
    (folder / "folder.ckpt").symlink_to(precious)
    (folder / "file.ckpt").symlink_to(precious / "thesis.tex")
    (folder / "inner.ckpt").mkdir()
    (folder / "inner.ckpt.incomplete").touch()
    (folder / "inner.ckpt" / "shards").symlink_to(precious)
    assert CheckpointFolder(folder).remove_leftovers() == ["file.ckpt", "folder.ckpt", "inner.ckpt"]
    assert sorted(os.listdir(folder)) == ["step=1.ckpt", "step=1.ckpt.manifest.json"]
    assert (precious / "thesis.tex").read_text() == "years"


def test_a_mark_is_not_written_through_a_link(folder: Path, precious: Path) -> None:
    folder.mkdir()
    (folder / "step=1.ckpt.incomplete.part").symlink_to(precious / "thesis.tex")
    put_checkpoint(folder, 1)
    assert (precious / "thesis.tex").read_text() == "years"


def test_a_folder_in_place_of_a_mark_is_left_alone(make_checkpoint: MakeCheckpoint, folder: Path) -> None:
    make_checkpoint(1)
    (folder / "mine.incomplete").mkdir()
    (folder / "mine").touch()
    assert CheckpointFolder(folder).remove_leftovers() == []
    assert (folder / "mine").exists()


def test_a_checkpoint_that_is_a_link_is_resumed_from_and_only_the_link_removed(
    make_checkpoint: MakeCheckpoint, folder: Path, precious: Path
) -> None:
    moved = (folder / make_checkpoint(1, shards=2).name).rename(precious / "moved")
    (folder / "step=1.ckpt").symlink_to(moved)
    assert newest_valid(folder.parent) == folder / "step=1.ckpt"
    _write(folder, 60)
    assert not (folder / "step=1.ckpt").is_symlink()
    assert (moved / "inner" / "1.pt").exists()
