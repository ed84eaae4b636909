from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.checkpoint.conftest import MakeCheckpoint

from azureml_strategy.checkpoint.manifest import Manifest, manifest_path, manifests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("shards", [0, 3])
def test_what_was_written_is_whole(make_checkpoint: MakeCheckpoint, folder: Path, shards: int) -> None:
    written = make_checkpoint(7, score=0.5, shards=shards)
    (path,) = manifests(folder)
    read = Manifest.read(path)
    assert vars(read) == vars(written)
    assert read.fault(folder) is None
    assert len(read.files) == max(shards, 1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "inner/1.pt is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "1.pt has 1,299 of 1,300 bytes"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "1.pt has 1,301 of 1,300 bytes"),
        (_flip, "1.pt has other bytes than were written"),
    ],
)
def test_what_is_damaged_is_named(make_checkpoint: MakeCheckpoint, folder: Path, damage: object, words: str) -> None:
    manifest = make_checkpoint(7, shards=3)
    assert callable(damage)
    damage(folder / manifest.name / "inner" / "1.pt")
    assert words in str(manifest.fault(folder))


def test_without_reading_the_content_a_flipped_bit_goes_unseen(make_checkpoint: MakeCheckpoint, folder: Path) -> None:
    manifest = make_checkpoint(7)
    _flip(folder / manifest.name)
    assert manifest.fault(folder, content=False) is None
    assert manifest.fault(folder) is not None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"version": 2}', '{"version": 1}', '{"version": 2, "files": {}}'])
def test_what_is_no_manifest_is_refused(folder: Path, content: str) -> None:
    folder.mkdir()
    path = manifest_path(folder / "step=1.ckpt")
    path.write_text(content)
    with pytest.raises(ValueError, match=r"manifest|Expecting"):
        Manifest.read(path)


def test_a_manifest_cut_anywhere_is_refused(make_checkpoint: MakeCheckpoint, folder: Path) -> None:
    path = manifest_path(folder / make_checkpoint(7).name)
    whole = path.read_text()
    for length in range(0, len(whole) - 1, 7):
        path.write_text(whole[:length])
        with pytest.raises(ValueError, match=r"manifest|Expecting|Unterminated|Invalid|delimiter"):
            Manifest.read(path)
    assert json.loads(whole)["step"] == 7
