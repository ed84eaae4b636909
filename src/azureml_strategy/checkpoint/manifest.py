"""Write, read and check manifests: a checkpoint counts as complete only if its manifest matches its files.

A manifest lists the sizes and checksums of a checkpoint's files, and has a checksum of its own.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from isal.isal_zlib import crc32

from azureml_strategy.checkpoint.global_batch import GlobalBatch
from azureml_strategy.control.messages import register
from azureml_strategy.files import is_component

AnyPath = TypeVar("AnyPath", Path, PurePosixPath)
# Suffixes of the files that lie beside a checkpoint. No checkpoint's own name may end in one.
MANIFEST, MARK, PART = ".manifest.json", ".incomplete", ".part"
_VERSION = 2
_CHUNK_BYTES = 4 << 20
# Reading and checksumming release the interpreter's lock. A mount does not serve more threads faster.
_THREADS = 4
# Longest name of a checkpoint in bytes: Linux's NAME_MAX, less all suffixes that a name may get.
_LONGEST_NAME = 255 - len(MANIFEST + PART)

_Check = Callable[[Any], bool]


class OldVersionError(ValueError):
    """A manifest of version 1. It has no checksum of its own, and does not say which run wrote it, and when."""


class OverdueError(RuntimeError):
    """Files were not read before the deadline."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        size: bytes.
        crc32: checksum of the content, as in `zlib.crc32`; it reveals flipped bytes.
    """

    size: int
    crc32: int


@dataclass(frozen=True, eq=False)
class Manifest:
    """The list of a checkpoint's files. It lies beside the checkpoint, and is written when all files are on disk.

    Attributes:
        name: name of the checkpoint, a file or a folder beside the manifest.
        step: number of finished optimizer steps.
        epoch: epoch in which the checkpoint was written.
        saved_at: seconds since 1970 on rank 0, for people to read; no decision depends on a clock.
        world_size: number of ranks that wrote the checkpoint.
        reason: why it was written.
        score: value of the monitored metric; None if it was not measured at this step.
        mode: `min` or `max`: which score is better.
        files: files by their path relative to the manifest's folder.
        global_batch: samples of the optimizer steps; None if not known.
        attempt: number of the attempt in this folder that wrote the checkpoint, counted from 1.
        run_id: id of the Azure ML run that wrote it; None outside a job.
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
    attempt: int = 1
    run_id: str | None = None

    def write(self, folder: Path) -> None:
        """Write the manifest beside the checkpoint. It appears complete or not at all.

        Raises:
            ValueError: `read` would refuse it.
            OSError: it cannot be written.
        """
        text = self.to_text()
        _require_valid(json.loads(text), self.name + MANIFEST)
        write_durably(manifest_path(folder / self.name), text)

    def to_text(self) -> str:
        """The text that `write` writes."""
        return _signed({"version": _VERSION, **asdict(self)})

    @staticmethod
    def read(path: Path) -> Manifest:
        """Read a manifest without trusting its content.

        Raises:
            OldVersionError: it is of version 1.
            ValueError: it is no manifest, or it has changed since it was written.
            OSError: it cannot be read.
        """
        if not path.is_file():
            raise ValueError(f"{path.name} is no file")
        text = path.read_bytes().decode("utf-8")
        try:
            content = json.loads(text)
            _require_signed(content, text, path.name)
        except RecursionError as error:
            raise ValueError(f"{path.name} is no manifest: it is nested too deep") from error
        _require_valid(content, path.name)
        files = {name: StoredFile(**each) for name, each in content["files"].items()}
        batch = None if content["global_batch"] is None else GlobalBatch(**content["global_batch"])
        fields = {key: value for key, value in content.items() if key not in ("version", "crc32")}
        return Manifest(**(fields | {"files": files, "global_batch": batch}))

    @staticmethod
    def of(checkpoint: Path) -> Manifest | None:
        """The manifest of a checkpoint; None if there is none, or one of version 1, which cannot be checked against.

        Raises:
            ValueError: there is one, but it is no valid manifest, or it has changed since it was written.
            OSError: it cannot be read.
        """
        path = manifest_path(checkpoint)
        try:
            return Manifest.read(path) if os.path.lexists(path) else None
        except OldVersionError:
            return None

    def fault(self, folder: Path, content: bool = True) -> str | None:
        """Say how the files differ from those that were written; None if they are the same.

        Args:
            folder: the manifest's folder.
            content: compare checksums too, which reads every byte.
        """
        fault = look(folder, self.files)
        return content_fault(folder, self.files) if content and fault is None else fault


register(StoredFile, Manifest, GlobalBatch)


def look(folder: Path, files: Mapping[str, StoredFile]) -> str | None:
    """Compare names and sizes of files with the manifest, and say what differs; None if nothing does.

    Args:
        folder: the manifest's folder.
        files: the files in the manifest.
    """
    return next((fault for name, stored in files.items() if (fault := _look(folder, name, stored))), None)


def content_fault(folder: Path, files: Mapping[str, StoredFile], deadline: float = math.inf) -> str | None:
    """Compare checksums of files with the manifest, and say what differs; None if nothing does.

    Several threads read every byte.

    Args:
        folder: the manifest's folder.
        files: the files in the manifest.
        deadline: latest time, by `time.monotonic`.

    Raises:
        OverdueError: the deadline is past.
    """
    largest_first = sorted(files.items(), key=lambda item: -item[1].size)
    with ThreadPoolExecutor(_THREADS) as threads:
        faults = threads.map(lambda item: _content_fault(folder, item[0], item[1], deadline), largest_first)
        fault = next(filter(None, faults), None)
        threads.shutdown(cancel_futures=True)
    return fault


def _look(folder: Path, name: str, stored: StoredFile) -> str | None:
    path = folder / name
    try:
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if size == stored.size else f"{name} has {size:,} of {stored.size:,} bytes"


def _content_fault(folder: Path, name: str, stored: StoredFile, deadline: float) -> str | None:
    try:
        same = stored_file(folder / name, deadline) == stored
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if same else f"{name} has other bytes than were written"


def manifest_path(checkpoint: AnyPath) -> AnyPath:
    """The path of a checkpoint's manifest."""
    return checkpoint.with_name(checkpoint.name + MANIFEST)


def manifests(folder: Path) -> list[Path]:
    """The paths of the manifests in a folder, sorted by name; none if the folder does not exist."""
    return sorted(folder.glob("*" + MANIFEST))


def is_checkpoint_name(name: str) -> bool:
    """Whether a checkpoint can have this name: a plain name, not hidden, and not the name of a file beside one."""
    plain = is_component(name) and not name.startswith(".") and not name.endswith((MANIFEST, MARK, PART))
    return plain and len(os.fsencode(name)) <= _LONGEST_NAME


def _signed(content: Mapping[str, Any]) -> str:
    """The text of a manifest, with a checksum that does not depend on the order of keys or on white space."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "crc32": crc32(canonical.encode())}, indent=1)


def _require_signed(content: Any, text: str, name: str) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{name} is no manifest")
    if type(content.get("version")) is int and content["version"] == 1:
        raise OldVersionError(f"{name} is of version 1, and this is version {_VERSION}")
    # Compare the whole text: one flipped bit turns 1e-07 into 1E-07, which is the same number.
    if _signed({key: value for key, value in content.items() if key != "crc32"}) != text:
        raise ValueError(f"{name} is damaged: its checksum is not that of its content")


def _whole(least: int, below: int = 1 << 63) -> _Check:
    return lambda value: type(value) is int and least <= value < below  # in Python, a bool is an int


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _exactly(fields: Mapping[str, _Check]) -> _Check:
    def check(value: Any) -> bool:
        return isinstance(value, dict) and value.keys() == fields.keys() and all(map(_fits(fields), value.items()))

    return check


def _fits(fields: Mapping[str, _Check]) -> Callable[[tuple[str, Any]], bool]:
    return lambda item: fields[item[0]](item[1])


_is_stored_file = _exactly({"size": _whole(0), "crc32": _whole(0, 1 << 32)})


def _are_files(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(_is_stored_file, value.values()))


_BATCH: dict[str, _Check] = {
    "batch_size": _or_none(_whole(0)),
    "replicas": _whole(1),
    "accumulation": _whole(1),
    "epoch_batches": _or_none(_whole(0)),
}
# The keys of a manifest, and the checks of their values.
_FIELDS: dict[str, _Check] = {
    "version": _whole(_VERSION, _VERSION + 1),
    "name": lambda value: isinstance(value, str) and is_checkpoint_name(value),
    "step": _whole(0),
    "epoch": _whole(0),
    "saved_at": lambda value: isinstance(value, float) and math.isfinite(value),
    "world_size": _whole(1),
    "reason": lambda value: isinstance(value, str),
    "score": _or_none(lambda value: isinstance(value, float)),  # NaN in a run that diverged
    "mode": lambda value: value in ("min", "max"),
    "files": _are_files,
    "global_batch": _or_none(_exactly(_BATCH)),
    "attempt": _whole(1),
    "run_id": _or_none(lambda value: isinstance(value, str) and value.isprintable() and value != ""),
    "crc32": _whole(0, 1 << 32),
}


def _require_valid(content: dict[str, Any], name: str) -> None:
    """Require exactly the keys that we write, and values that fit together."""
    if content.keys() != _FIELDS.keys():
        raise ValueError(f"{name} is no manifest: it has {reprlib.repr(sorted(content.keys() ^ _FIELDS.keys()))} wrong")
    for key, value in content.items():
        if not _FIELDS[key](value):
            raise ValueError(f"{name} is no manifest: its {key} is {reprlib.repr(value)}")
    if name != content["name"] + MANIFEST:
        raise ValueError(f"{name} is the manifest of {content['name']}")
    for file in content["files"]:
        first, *below = file.split("/")
        if first != content["name"] or not all(map(is_component, below)):
            raise ValueError(f"{name} lists {reprlib.repr(file)}, which is no part of {content['name']}")


def stored_file(path: Path, deadline: float = math.inf) -> StoredFile:
    """Measure size and checksum of a file.

    Args:
        path: path of the file.
        deadline: latest time, by `time.monotonic`.

    Raises:
        OSError: the file cannot be read.
        OverdueError: the deadline is past.
    """
    size = checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if time.monotonic() > deadline:
                raise OverdueError(f"{path} was not read in time: {size:,} bytes of it")
            size += len(chunk)
            checksum = crc32(chunk, checksum)
    return StoredFile(size, checksum)


def write_durably(path: Path, text: str) -> None:
    """Write a small file to disk. Whatever happens, it appears complete or not at all.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(path.name + PART)
    part.unlink(missing_ok=True)
    with open(part, "x", encoding="utf-8") as file:  # "x" creates a new file, and never writes through a link
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk.

    Raises:
        OSError: the disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
