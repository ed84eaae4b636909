"""What a checkpoint consists of: it counts only with a list of its files that fits them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

from azureml_strategy.checkpoint.global_batch import GlobalBatch

AnyPath = TypeVar("AnyPath", Path, PurePosixPath)
_SUFFIX = ".manifest.json"
_VERSION = 1
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        size: bytes.
        crc32: of its content, as in `zlib.crc32`: finds flipped bytes at the speed of memory.
    """

    size: int
    crc32: int


@dataclass(frozen=True, eq=False)
class Manifest:
    """The list of a checkpoint's files, written when all of them are on disk. It lies beside the checkpoint.

    Attributes:
        name: of the checkpoint, a file or a folder beside the manifest.
        step: optimizer steps that were done.
        epoch: the one it was written in.
        saved_at: seconds since 1970 on rank 0.
        world_size: ranks that wrote it.
        reason: why it was written.
        score: of the monitored metric; None where it was not measured at this step.
        mode: `min` or `max`: which score is better.
        files: by their path from the manifest's folder.
        global_batch: what its steps learned from; None in a manifest of a time when it was not written down.
    """

    name: str
    step: int
    epoch: int
    saved_at: float
    world_size: int
    reason: str
    score: float | None
    mode: str
    files: Mapping[str, StoredFile]
    global_batch: GlobalBatch | None = None

    def write(self, folder: Path) -> None:
        """Write it beside the checkpoint; complete, or not there at all.

        Raises:
            OSError: it cannot be written.
        """
        write_durably(manifest_path(folder / self.name), json.dumps({"version": _VERSION, **asdict(self)}, indent=1))

    @staticmethod
    def read(path: Path) -> Manifest:
        """Read a manifest.

        Raises:
            ValueError: it is none, or of a later version.
            OSError: it cannot be read.
        """
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.pop("version", None) != _VERSION:
            raise ValueError(f"{path.name} is no manifest of version {_VERSION}")
        try:
            files = {name: StoredFile(**each) for name, each in content.pop("files").items()}
            batch = content.pop("global_batch", None)
            return Manifest(files=files, global_batch=GlobalBatch(**batch) if batch else None, **content)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path.name} is no manifest: {error}") from error

    def fault(self, folder: Path, content: bool = True) -> str | None:
        """Why the files are not those that were written; None if they are.

        Args:
            folder: the manifest's.
            content: compare checksums too, which reads every byte.
        """
        for name, stored in self.files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != stored.size:
                return f"{name} has {path.stat().st_size:,} of {stored.size:,} bytes"
        for name, stored in self.files.items() if content else ():
            try:
                if stored_file(folder / name) != stored:
                    return f"{name} has other bytes than were written"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
        return None


def manifest_path(checkpoint: AnyPath) -> AnyPath:
    """Where a checkpoint's manifest lies."""
    return checkpoint.with_name(checkpoint.name + _SUFFIX)


def manifests(folder: Path) -> list[Path]:
    """The manifests in a folder, in the order of their names; none where there is no folder."""
    return sorted(folder.glob("*" + _SUFFIX))


def stored_file(path: Path) -> StoredFile:
    """Size and checksum of a file.

    Raises:
        OSError: it cannot be read.
    """
    size = checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return StoredFile(size, checksum)


def write_durably(path: Path, text: str) -> None:
    """Write a small file that is complete or not there, whatever happens.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder reach the disk.

    Raises:
        OSError: the disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
