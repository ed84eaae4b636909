"""Keep a run's checkpoints in one folder: find the complete ones, and delete what is not needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from azureml_strategy.checkpoint.manifest import (
    MARK,
    PART,
    Manifest,
    StoredFile,
    is_checkpoint_name,
    manifest_path,
    manifests,
    stored_file,
    write_durably,
)
from azureml_strategy.cluster.job import read_job

# A mark is a file beside a checkpoint. It exists from before the checkpoint's first byte until its manifest is written,
# and again while the checkpoint is deleted. It holds the run's id. Only what a mark of this run names is cleaned up.
# Other files are never touched.
_LONGEST_MARK_BYTES = 1024

FileChecksums = Mapping[str, StoredFile]
"""Files whose size and checksum are known, by their path relative to the folder."""


class CheckpointFolder:
    """Checkpoints with manifests in one folder, on a local disk or a mount.

    The class renames only single files, and never writes under a name that exists. So an interrupted write or deletion
    leaves something without a manifest, and never damages a checkpoint that has one. The content of manifests and marks
    is not trusted: names in them cannot lead out of the folder, and deletion follows no links.

    The folder is created when something is written. The Azure ML run with this id uses it, and deletes only its own
    checkpoints; outside a job the id is None.
    """

    def __init__(self, path: Path, run_id: str | None = None) -> None:
        self.path = path
        self.run_id = run_id

    def complete(self) -> list[Manifest]:
        """The readable manifests of all runs, newest first."""
        return newest_first(self._readable())

    def own(self) -> list[Manifest]:
        """The readable manifests of this run, newest first. Outside a job: those that were written outside a job."""
        return [each for each in self.complete() if each.run_id == self.run_id]

    def next_attempt(self) -> int:
        """The number of a new attempt: one above the highest attempt of the checkpoints in the folder."""
        return 1 + max((each.attempt for each in self._readable()), default=0)

    def newer_than(self, checkpoint: Path) -> frozenset[str]:
        """The names of the complete checkpoints that are newer than `checkpoint`; none if it is not one of them."""
        complete = self.complete() if checkpoint.parent.absolute() == self.path.absolute() else []
        names = [each.name for each in complete]
        return frozenset(names[: names.index(checkpoint.name)] if checkpoint.name in names else ())

    def begin(self, name: str) -> str:
        """Mark a checkpoint as incomplete before it is written.

        Returns:
            The name, such as `step=100.ckpt`, with a number appended if it is taken.

        Raises:
            ValueError: no checkpoint can have this name.
        """
        if not is_checkpoint_name(name):
            raise ValueError(f"{name!r} is no name for a checkpoint: give a `filename` of fewer, printable characters")
        self.path.mkdir(parents=True, exist_ok=True)
        stem, suffix = os.path.splitext(name)
        number = 0
        while any(map(os.path.lexists, (self.path / name, manifest_path(self.path / name), self._mark(name)))):
            number += 1
            name = f"{stem}-v{number}{suffix}"
        self._put_mark(name)
        return name

    def listing(self, name: str) -> list[str]:
        """The files of a checkpoint that this process sees, by their path relative to the folder."""
        path = self.path / name
        found = [path] if path.is_file() else (each for each in path.rglob("*") if each.is_file())
        return sorted(str(each.relative_to(self.path)) for each in found)

    def flush_and_checksum(self, files: Iterable[str], summed: FileChecksums) -> dict[str, StoredFile]:
        """Flush files to disk and compute their checksums.

        The files in `summed` are on disk already and have a checksum. Only their size is checked.

        Raises:
            OSError: the disk fails or is full, or a file in `summed` has another size.
        """
        stored = {}
        for file in files:
            path, known = self.path / file, summed.get(file)
            if known is None:
                with open(path, "rb") as opened:
                    os.fsync(opened.fileno())
            elif (size := path.stat().st_size) != known.size:
                raise OSError(f"{path} has {size:,} bytes, and {known.size:,} were written")
            stored[file] = known or stored_file(path)
        return stored

    def commit(self, manifest: Manifest) -> Manifest:
        """Write the manifest, which makes the checkpoint complete, and return it.

        Raises:
            ValueError: `Manifest.read` would refuse the manifest.
        """
        manifest.write(self.path)
        with suppress(OSError):  # a mark left beside a manifest does no harm
            self._mark(manifest.name).unlink(missing_ok=True)
        return manifest

    def remove(self, name: str) -> None:
        """Delete a checkpoint, its manifest first, so that what an interrupted deletion leaves is not complete."""
        self._put_mark(name)
        manifest_path(self.path / name).unlink(missing_ok=True)
        self._remove_content(name)

    def remove_leftovers(self) -> list[str]:
        """Delete what interrupted writes and deletions of this run have left, and return the checkpoints' names."""
        names = sorted(mark.name.removesuffix(MARK) for mark in self.path.glob("*" + MARK) if self._is_own(mark))
        left = [name for name in names if not os.path.lexists(manifest_path(self.path / name))]
        for name in left:
            self._remove_content(name)
        for name in names:
            self._mark(name).unlink(missing_ok=True)
        return left

    def free_bytes(self) -> int:
        """The free bytes of the folder's disk."""
        return shutil.disk_usage(self.path).free

    def _remove_content(self, name: str) -> None:
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        for file in (path, path.with_name(name + PART), manifest_path(path).with_name(manifest_path(path).name + PART)):
            file.unlink(missing_ok=True)
        self._mark(name).unlink(missing_ok=True)

    def _readable(self) -> Iterable[Manifest]:
        for path in manifests(self.path):
            try:
                yield Manifest.read(path)
            except (ValueError, OSError):
                continue  # an unreadable manifest is reported on resume; here it does not count

    def _mark(self, name: str) -> Path:
        return self.path / (name + MARK)

    def _put_mark(self, name: str) -> None:
        write_durably(self._mark(name), self.run_id or "")

    def _is_own(self, mark: Path) -> bool:
        if not is_checkpoint_name(mark.name.removesuffix(MARK)) or mark.is_symlink() or not mark.is_file():
            return False
        with open(mark, "rb") as file:
            return file.read(_LONGEST_MARK_BYTES) == (self.run_id or "").encode()


def this_run() -> str | None:
    """The id of the Azure ML run that this process belongs to; None outside a job."""
    job = read_job()
    return None if job is None else job.run_id


def newest_first(found: Iterable[Manifest]) -> list[Manifest]:
    """Sort by attempt, then by step, the newest first.

    The attempt comes first, because a run with `resume=never` is newer than the checkpoints it found. Clocks may be
    wrong, so times do not count.
    """
    return sorted(found, key=lambda each: (each.attempt, each.step, each.name), reverse=True)


def superfluous(complete: list[Manifest], keep_last: int, keep_best: int, mode: str) -> list[Manifest]:
    """Select the checkpoints that may be deleted. The newest come first.

    `keep_last` is at least 1, and `mode` is `min` or `max`. `keep_best=-1` keeps all that have a score.
    """
    kept = {each.name for each in complete[:keep_last]}
    kept |= {each.name for each in by_score(complete, mode)[: None if keep_best < 0 else keep_best]}
    return [each for each in complete if each.name not in kept]


def by_score(complete: list[Manifest], mode: str) -> list[Manifest]:
    """The checkpoints that have a score, the best first; NaN is the worst score."""
    sign = 1.0 if mode == "min" else -1.0

    def rank(score: float) -> float:
        return float("inf") if score != score else sign * score

    scored = [(rank(each.score), each) for each in complete if each.score is not None]
    return [each for _, each in sorted(scored, key=lambda pair: pair[0])]
