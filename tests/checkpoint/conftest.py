"""Checkpoints made by hand, and manifests of strangers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.manifest import Manifest
from azureml_strategy.control.gather import Exchange

MakeCheckpoint = Callable[..., Manifest]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Write a checkpoint into the folder `checkpoints`: a file, or so many shards; its time is its step."""

    def make(step: int, score: float | None = None, shards: int = 0, **fields: Any) -> Manifest:
        return put_checkpoint(tmp_path / "checkpoints", step, score, shards, **fields)

    return make


def put_checkpoint(
    path: Path, step: int, score: float | None = None, shards: int = 0, saved_at: float | None = None, **fields: Any
) -> Manifest:
    """Write a checkpoint into a folder."""
    folder = CheckpointFolder(path, **({"run_id": fields["run_id"]} if "run_id" in fields else {}))
    name = folder.begin(f"step={step}.ckpt")
    for part in [path / name] if not shards else [path / name / "inner" / f"{shard}.pt" for shard in range(shards)]:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(b"weights of %d " % step * 100)
    files = folder.flush_and_checksum(folder.listing(name), {})
    at = float(step) if saved_at is None else saved_at
    manifest = Manifest(name, step, 0, at, 1, "test", score, "max", files, **fields)
    folder.commit(manifest)
    return manifest


def put_new(path: Path, _: Exchange) -> None:
    """The parts of a checkpoint, one small file."""
    path.write_bytes(b"new")


def forge(manifest: Path, target: Path | None = None, **fields: Any) -> Path:
    """Rewrite a manifest as a stranger would who knows how its checksum is made.

    Args:
        manifest: the one to take.
        target: where to write it; else in its place.
        fields: what to change.
    """
    content = json.loads(manifest.read_text()) | fields
    path = target or manifest
    path.write_text(json.dumps(signed(content), indent=1))
    return path


def signed(content: dict[str, Any]) -> dict[str, Any]:
    """With the checksum that belongs to it, where manifests have one."""
    if "crc32" not in content:
        return content
    unsigned = {key: value for key, value in content.items() if key != "crc32"}
    text = json.dumps(unsigned, sort_keys=True, separators=(",", ":"))
    return {**content, "crc32": zlib.crc32(text.encode())}


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What seed_everything writes goes away again."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
