"""What a folder of training data is like, before it is sent away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from azureml_strategy.jobs.errors import JobError

_SHARDS = (".tar", ".tar.gz", ".tgz")  # WebDataset's
_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm")
# Azure ML's data loading guide asks for files of 4 MB and more; below that, the requests cost more than the bytes.
_SMALL_BYTES = 4_000_000
_MANY_FILES = 100_000


@dataclass(frozen=True)
class DataSurvey:
    """What lies in a folder, or what a file is.

    Attributes:
        files: how many.
        size: bytes of all.
        folders: how many have files in them.
        kind: `shards`, `images in folders`, or `files`.
    """

    files: int
    size: int
    folders: int
    kind: str

    @property
    def advice(self) -> str | None:
        """What would make training on it faster; None where it is fine."""
        if self.kind == "shards" or self.files < _MANY_FILES or self.size / self.files >= _SMALL_BYTES:
            return None
        return (
            f"{self.files:,} files of {self.size / self.files / 1000:,.0f} KB on average cost a request each, in the "
            "upload and in every epoch that does not find them on the node's disk. Pack them into tar shards of some "
            "100 MB, or put them on premium storage, and give the job a size with a local disk."
        )

    def __str__(self) -> str:
        return f"{self.files:,} file(s) in {self.folders:,} folder(s), {self.size / 1e9:,.2f} GB, {self.kind}"


def survey_data(path: Path) -> DataSurvey:
    """Count the files of a folder, links followed, or look at the one file.

    Raises:
        JobError: nothing is there, or there are no files in it.
    """
    if not path.exists():
        raise JobError(f"There is no {path}. Give the folder or file to upload.")
    entries = list(_files(path)) if path.is_dir() else [(path.name, path.stat().st_size, str(path.parent))]
    if not entries:
        raise JobError(f"There are no files in {path}. Give the folder that holds the data.")
    names = [name.lower() for name, _, _ in entries]
    folders = {folder for _, _, folder in entries}
    kind = "files"
    if all(name.endswith((*_SHARDS, ".json", ".idx", ".txt")) for name in names) and any(
        name.endswith(_SHARDS) for name in names
    ):
        kind = "shards"
    elif len(folders) > 1 and any(name.endswith(_IMAGES) for name in names):
        kind = "images in folders"
    return DataSurvey(len(entries), sum(size for _, size, _ in entries), len(folders), kind)


def _files(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Name, size and folder of each file; scandir asks the disk once for a file where Path would ask twice."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files(Path(entry.path))
            elif entry.is_file():
                yield entry.name, entry.stat().st_size, str(folder)
