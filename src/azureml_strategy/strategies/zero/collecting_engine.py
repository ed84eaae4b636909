"""Collects the files of a DeepSpeed checkpoint before any of them is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from typing_extensions import override

StagedFiles = list[tuple[str, Any]]


class CollectingEngine(CheckpointEngine):  # type: ignore[misc] # DeepSpeed has no annotations
    """Checkpoint engine that keeps what DeepSpeed would write, instead of writing it.

    Attributes:
        files: paths below the checkpoint's folder, and the content of each. Tensors are the training's, not copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: StagedFiles = []
        self._folder = ""

    @override
    def create(self, info: CheckpointCommitInfo) -> None:
        self._folder = info.save_dir

    @override
    def save(self, state_dict: Any, path: str) -> None:
        self.files.append((os.path.relpath(path, self._folder), state_dict))

    @override
    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: the folders are made when the files are written."""

    @override
    def load(self, path: str, map_location: Any = None) -> Any:
        raise NotImplementedError("It collects one checkpoint, and loads none.")

    @override
    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True

    @override
    def preserves_storage_sharing(self) -> bool:
        return False  # with True, DeepSpeed clones tensors that share memory, so that the file does not hold all of it


def can_be_collected(engine: DeepSpeedEngine) -> bool:
    """Whether the default checkpoint engine writes the whole checkpoint. It does not with states on an NVMe disk."""
    offloads = (engine.zero_offload_param(), engine.zero_offload_optimizer())
    offloaded = any(each is not None and each.device == "nvme" for each in offloads)
    return type(engine.checkpoint_engine) is TorchCheckpointEngine and not offloaded


def collect(
    engine: DeepSpeedEngine, save: Callable[[str], None]
) -> tuple[StagedFiles, Callable[[StagedFiles, Path], None]]:
    """Collect this rank's files of the checkpoint that `save` has the engine save to a folder. This is a collective.

    Returns:
        The files, and a function that writes them, or a copy of them, below a path.
    """
    writes, collecting = engine.checkpoint_engine, CollectingEngine()
    engine.checkpoint_engine = collecting
    # On rank 0, DeepSpeed writes a few small files without the checkpoint engine. They go to memory, as /tmp may be
    # full, and are read at once, as a rank that is killed leaves its folder there.
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as scratch:
        try:
            save(scratch)
        finally:
            engine.checkpoint_engine = writes
        small_files = {each.name: each.read_bytes() for each in Path(scratch).iterdir()}

    def write(files: StagedFiles, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, content in files:
            (path / name).parent.mkdir(exist_ok=True)
            writes.save(content, str(path / name))
        for name, small in small_files.items():
            (path / name).write_bytes(small)

    return collecting.files, write
