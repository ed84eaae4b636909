"""Checkpoints made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from azureml_strategy.checkpoint.manifest import Manifest
from azureml_strategy.checkpoint.storage_folder import CheckpointFolder

MakeCheckpoint = Callable[..., Manifest]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Write a checkpoint into the folder `checkpoints`: a file, or so many shards; its time is its step."""

    def make(step: int, score: float | None = None, shards: int = 0, saved_at: float | None = None) -> Manifest:
        folder = CheckpointFolder(tmp_path / "checkpoints")
        name = folder.begin(f"step={step}.ckpt")
        path = folder.path / name
        for part in [path] if not shards else [path / "inner" / f"{shard}.pt" for shard in range(shards)]:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(b"weights of %d " % step * 100)
        files = folder.settle(folder.listing(name))
        manifest = Manifest(
            name, step, 0, float(step) if saved_at is None else saved_at, 1, "test", score, "max", files
        )
        folder.commit(manifest)
        return manifest

    return make
