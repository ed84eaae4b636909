"""Finds images in class folders, and reports what is wrong if there are none."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.data.skipped import PassedOver, first_names, is_no_data, warn

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_INPUT_PREFIX = "AZURE_ML_INPUT_"
_HINT = (
    "Give the folder that holds it as `root=...` (in a recipe: data.root=...). In an Azure ML job, mount the data "
    "as an input and pass it on, data.root=${{inputs.NAME}}, or name the input: data.input_name=NAME."
)


class DataFolderError(FileNotFoundError):
    """A data folder is missing, empty or has another layout. The message names it."""


@dataclass(frozen=True)
class ClassFolders:
    """The images below a root, one folder per class: `root/class/image.jpg`.

    Attributes:
        root: the folder that holds the class folders.
        classes: names of the class folders, sorted; the index of a class is its label.
        names: `class/image.jpg` of each image, as bytes. They are a numpy array, whose memory worker processes share.
            A list of strings would be copied page by page into each of them, by its reference counts.
        labels: int64 labels of the images.
    """

    root: str
    classes: tuple[str, ...]
    names: NDArray[np.bytes_]
    labels: NDArray[np.int64]

    def path(self, index: int) -> str:
        """Return the full path of an image."""
        return os.path.join(self.root, os.fsdecode(self.names[index]))


def scan_class_folders(root: str | os.PathLike[str]) -> ClassFolders:
    """List the images below a root, without opening any.

    Only the extension counts (`EXTENSIONS`, in either case), so listing a mounted data set only reads its folders.
    Hidden folders and files are skipped. What else is passed over is counted in a warning: files with other extensions,
    folders within a class folder, and images outside of one. A class folder without images is kept with a warning,
    because skipping it would shift the labels after it.

    Raises:
        DataFolderError: the folder does not exist, has no class folders, or none of them has images.
    """
    root = os.path.expanduser(os.fspath(root))
    classes, outside = list_class_folders(root)
    with ThreadPoolExecutor(max_workers=16) as pool:  # listing a mounted folder mostly waits for the network
        listed = list(pool.map(lambda name: _image_names(root, name), classes))
    names = [name for folder, _ in listed for name in folder]
    if not names:
        seen = f"{len(classes)} class folders ({first_names(classes)}), none with an image ({', '.join(EXTENSIONS)})"
        raise DataFolderError(f"The data folder {root} has {seen}. {_HINT}")
    empty = [name for name, (folder, _) in zip(classes, listed, strict=True) if not folder]
    if empty:
        warn(f"{len(empty)} of {len(classes)} class folders in {root} have no image: {first_names(empty)}")
    passed_over = PassedOver()
    passed_over.extend([outside, *(others for _, others in listed)])
    if passed_over:
        warn(
            f"{root}: {len(names):,} images are read, and {passed_over.count:,} other files and folders are passed "
            f"over: {passed_over}. An image lies directly in the folder of its class and ends in "
            f"{', '.join(EXTENSIONS)}: convert or move what is to be read."
        )
    labels = np.repeat(np.arange(len(classes)), [len(folder) for folder, _ in listed])
    return ClassFolders(root, tuple(classes), np.array(names, dtype=np.bytes_), labels)


@contextmanager
def written_once(folder: Path, prefix: str) -> Iterator[Path | None]:
    """Yield a path to write a folder at, which gets its name at the end of the context; None if the folder exists.

    The path is in a temporary folder beside it, so that a killed process leaves no incomplete data set. If several
    processes write at once, on any number of nodes, the first one wins, and the others use its files.
    """
    if folder.is_dir():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as scratch:
        written = Path(scratch) / folder.name
        yield written
        try:
            written.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first
                raise


def file_digest(root: Path, names: Iterable[str | Path]) -> str:
    """Hash names, sizes and times of files. The hash differs if a file was changed, added or removed."""
    digest = hashlib.sha256()
    for name in names:
        facts = (root / name).stat()
        digest.update(f"{name}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def user_cache() -> Path:
    """Return the folder of this package in the user's cache: `~/.cache`, or XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "azureml_strategy"


def resolve_place(root: str | os.PathLike[str] | None, input_name: str | None, environ: Mapping[str, str]) -> str:
    """Return where a data set is: `root` as given, or where Azure ML mounted the job's input `input_name`.

    Args:
        root: a folder, or an address.
        input_name: name of an input of the job. Azure ML writes its mount point to AZURE_ML_INPUT_<name>.
        environ: the process's environment variables.

    Raises:
        ValueError: neither or both are given.
        DataFolderError: the job has no such input.
    """
    if (root is None) == (input_name is None):
        seen = "neither" if root is None else f"both root={os.fspath(root)!r} and input_name={input_name!r}"
        raise ValueError(f"A data set needs either `root` or `input_name`, and {seen} was given. {_HINT}")
    if root is not None:
        return os.fspath(root)
    variable = f"{_INPUT_PREFIX}{input_name}"
    if variable not in environ:
        known = sorted(name.removeprefix(_INPUT_PREFIX) for name in environ if name.startswith(_INPUT_PREFIX))
        raise DataFolderError(
            f"input_name={input_name!r}, but {variable} is not set: this process has "
            f"{'the inputs ' + ', '.join(known) if known else 'no Azure ML inputs'}. Add "
            f"`inputs: {{{input_name}: {{type: uri_folder, path: ...}}}}` to the job, or give the folder: "
            "data.root=..."
        )
    return environ[variable]


def list_class_folders(root: str | os.PathLike[str]) -> tuple[list[str], PassedOver]:
    """Return the names of the class folders in a folder, sorted, and the images beside them.

    Raises:
        DataFolderError: the folder does not exist, or has no class folders.
    """
    if not os.path.isdir(root):
        raise DataFolderError(f"There is no data folder {root}. {_HINT}")
    with os.scandir(root) as entries:
        found = list(entries)
    classes = sorted(entry.name for entry in found if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        seen = f"only files ({first_names([entry.name for entry in found])})" if found else "nothing"
        raise DataFolderError(f"The data folder {root} has {seen} in it, but no class folders. {_HINT}")
    outside = PassedOver()
    for name in sorted({entry.name for entry in found if _is_image(entry.name)}.difference(classes)):
        outside.add(name)
    return classes, outside


def _image_names(root: str, class_name: str) -> tuple[list[bytes], PassedOver]:
    """Return the images of a class, and what else its folder holds."""
    names, others = [], PassedOver()
    with os.scandir(os.path.join(root, class_name)) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if _is_image(entry.name) and entry.is_file():  # no pipe or device, which may never end
            names.append(os.fsencode(f"{class_name}/{entry.name}"))
        elif not is_no_data(entry.name):
            others.add(f"{class_name}/{entry.name}{'/' if entry.is_dir() else ''}")
    return names, others


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")
