"""Finds what is to be packed: class folders, WebDataset tars, or a data set of Hugging Face, with its splits."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from azureml_strategy.data.folders import ClassFolders, scan_class_folders
from azureml_strategy.data.packing.images import ImageForm, ImageRecords, Samples, read_classes, refuse_full_size
from azureml_strategy.data.packing.shards import PackError, Records
from azureml_strategy.data.packing.workers import Task
from azureml_strategy.data.passed_over import first_names, is_no_data, warn
from azureml_strategy.data.readers import find_index
from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex, warn_of_unread_files
from azureml_strategy.data.tar_index import index_tars, read_tar, split_of
from azureml_strategy.inside import is_one_line

# Where a split becomes the validation set, in the order of preference.
_VALIDATION = ("val", "validation", "valid", "test")
# Threads that ask for sizes: on a mount each waits for the network.
_ASKING = 32
# Images that are looked at where all of them would take too long.
_EXAMPLES = 100


class Part(ABC):
    """What becomes one packed set: the whole source, or its training or validation split.

    Attributes:
        digest: hash of what the source holds. It differs if a file was changed, added or removed.
        count: number of samples of the tasks, for their progress; 0 where there are no tasks.
    """

    digest: str
    count: int = 0

    def tasks(self, work: Path) -> Sequence[Task]:
        """Return what has to be done, in any order, before there are records."""
        return ()

    @abstractmethod
    def examples(self) -> Iterator[bytes]:
        """Return some of what the source holds, quickly."""

    @abstractmethod
    def records(self, work: Path, workers: int) -> Records:
        """Return the samples.

        Args:
            work: folder for what they need while they are packed.
            workers: processes that may be used.
        """


@dataclass
class ImagePart(Part):
    """Images that lie in files already, and need not be unpacked.

    Attributes:
        root: the folder of the files.
        classes: names of the classes.
        digest: see `Part`.
        find: returns where they lie, with so many processes; it may have to read all of them.
        first: returns the first ones.
        form: what becomes of each.
        unit: as that of `Samples`.
    """

    root: str
    classes: tuple[str, ...]
    digest: str
    find: Callable[[int], Samples]
    first: Callable[[], Iterator[bytes]]
    form: ImageForm
    unit: str = ""

    @override
    def examples(self) -> Iterator[bytes]:
        return self.first()

    @override
    def records(self, work: Path, workers: int) -> Records:
        folder = work / "samples"
        if not folder.is_dir():
            self.find(workers).save(folder)
        return ImageRecords(self.root, read_classes(folder), self.unit, folder, self.form)


def find_images(source: Path, form: ImageForm) -> dict[str, Part]:
    """Find the images below a folder, without opening any.

    Args:
        source: class folders, WebDataset tars, Parquet or Arrow files; or folders `train` and `val` of these.
        form: what becomes of each image.

    Returns:
        The parts by the names of their folders in the packed set: `train` and `val`, or one that is called ``.

    Raises:
        PackError: it is something else.
        DataFolderError: it has neither class folders nor images.
    """
    if not source.is_dir():
        raise PackError(f"There is no folder {source}. Give the folder of the images: class folders, tars or Parquet.")
    parts = _find_parts(source, form)
    if form.raw and form.resize is None:
        refuse_full_size(next(iter(parts.values())).examples())
    return parts


def _find_parts(source: Path, form: ImageForm) -> dict[str, Part]:
    from azureml_strategy.data.packing.tables import find_tables

    tables = find_tables(source, form)
    if tables:
        return tables
    split = split_folders(source)
    if split:
        parts = {name: _find_part(folder, form) for name, folder in split.items()}
        return _same_classes(parts, split)
    return _tar_parts(source, form) or {"": _folder_part(scan_class_folders(source), form)}


def split_folders(source: Path) -> dict[str, Path]:
    """Return the folders of training and validation below a folder; nothing if it has no `train`."""
    if not (source / "train").is_dir():
        return {}
    validation = next((source / name for name in _VALIDATION if (source / name).is_dir()), None)
    packed = {"train": source / "train"} | ({} if validation is None else {"val": validation})
    names = {each.name for each in packed.values()}
    _warn_of_others(source, names, [f"{name}/" for name in _subfolders(source) if name not in names])
    return packed


def _subfolders(source: Path) -> list[str]:
    with os.scandir(source) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not is_no_data(entry.name))


def _warn_of_others(source: Path, packed: Iterable[str], others: Sequence[str]) -> None:
    """Warn of splits and folders that are not packed."""
    if others:
        warn(
            f"{source}: {' and '.join(sorted(packed))} are packed, and not {first_names(others)} ({len(others):,}). A "
            "packed set has one part for training and one for validation: pack others by a command of their own."
        )


def by_split(names: Iterable[str], source: Path) -> dict[str, list[str]]:
    """Sort files into training and validation by the words in their names; all are one set if none has such a word.

    Raises:
        PackError: some have such a word and others none; or there are several splits, and none is for training.
    """
    found: dict[str | None, list[str]] = {}
    for name in names:
        found.setdefault(split_of(name), []).append(name)
    if None in found and len(found) > 1:
        raise PackError(
            f"In {source}, {found[None][0]} does not say whether it is for training, as others do by `train` or `val` "
            "in their names. Move it to another folder, or rename it."
        )
    if "train" not in found and len(found) > 1:
        raise PackError(
            f"{source} holds files of {' and '.join(sorted(filter(None, found)))}, by their names, and none of train: "
            "they would become one set. Move each split into a folder of its own, and pack one by one: "
            f"azureml-strategy data pack {source}/val OUT/val; or add the files of train."
        )
    if "train" not in found:  # one split only, whichever
        return {"": [name for each in found.values() for name in each]}
    validation = next((name for name in ("val", "test") if name in found), None)
    packed = {"train": "train"} | ({} if validation is None else {"val": validation})
    others = [name for split, own in found.items() if split not in packed.values() for name in own]
    _warn_of_others(source, packed.values(), others)
    return {part: found[split] for part, split in packed.items()}


def file_digest(root: Path, names: Sequence[str]) -> str:
    """Hash names, sizes and times of files."""
    digest = hashlib.sha256()
    for name in names:
        facts = (root / name).stat()
        digest.update(f"{name}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _find_part(folder: Path, form: ImageForm) -> Part:
    names = _tars(folder)
    return _tar_part(folder, names, form) if names else _folder_part(scan_class_folders(folder), form)


def _tars(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.glob("*.tar") if not path.name.startswith(".") and path.is_file())
    if not found:
        # Says what to do where they are compressed; class folders have no such files.
        compressed = next(iter(sorted(folder.glob("*.tar.*"))), None) or next(iter(sorted(folder.glob("*.tgz"))), None)
        if compressed is not None:
            raise PackError(f"{compressed} is compressed. Decompress it first (gunzip, unxz, zstd -d), or extract it.")
    return found


def _tar_parts(source: Path, form: ImageForm) -> dict[str, Part]:
    names = _tars(source)
    if not names:
        return {}
    return {split: _tar_part(source, own, form) for split, own in by_split(names, source).items()}


def _tar_part(folder: Path, names: list[str], form: ImageForm) -> Part:
    def find(workers: int) -> Samples:
        indexed = (folder / INDEX_NAME).is_file()
        index = find_index(folder) if indexed else index_tars(folder, workers, names)
        if index.kind != "images":
            raise PackError(f"{folder} holds {index.kind}, which are packed already. Pack what they were made of.")
        warn_of_unread_files(str(folder), index)
        return _of_index(folder, index)

    return ImagePart(
        str(folder), (), file_digest(folder, names), find, lambda: _first_files(folder / names[0]), form, "byte"
    )


def _first_files(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for entry in islice(read_tar(file, path.stat().st_size, path.name), _EXAMPLES):
            if entry.content is not None:
                yield entry.content


def _of_index(folder: Path, index: ShardIndex) -> Samples:
    files = np.array([os.fsencode(name) for name in index.shards], np.bytes_)
    length = index.length.astype(np.int64)
    arrays = (files, files, index.shard, index.offset, length, index.label, index.offset)
    return Samples(str(folder), index.classes, *arrays, unit="byte")


def _folder_part(folders: ClassFolders, form: ImageForm) -> Part:
    odd = next((name for name in folders.classes if not is_one_line(name)), None)
    if odd is not None:
        raise PackError(
            f"{folders.root} has a class folder {odd!r}, and the names of classes are lines of a text. Rename it."
        )
    sizes, times = _sizes(folders)
    digest = hashlib.sha256(repr((folders.classes, folders.names.dtype)).encode())
    for array in (folders.names, folders.labels, sizes, times):
        digest.update(np.ascontiguousarray(array).data)
    numbers = np.arange(len(sizes), dtype=np.uint32)
    nothing = np.zeros(len(sizes), np.int64)
    samples = Samples(
        folders.root,
        folders.classes,
        folders.names,
        folders.names,
        numbers,
        nothing,
        sizes,
        folders.labels.astype(np.int32),
        nothing,
    )
    some = np.linspace(0, len(sizes) - 1, min(_EXAMPLES, len(sizes)), dtype=np.int64).tolist()
    return ImagePart(
        folders.root,
        folders.classes,
        digest.hexdigest(),
        lambda workers: samples,
        lambda: (samples.read(number) for number in some),
        form,
    )


def _sizes(folders: ClassFolders) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sizes in bytes, and times of the last change in nanoseconds."""
    sizes = np.zeros(len(folders.names), np.int64)
    times = np.zeros(len(folders.names), np.int64)

    def ask(numbers: range) -> None:
        for number in numbers:
            facts = os.stat(folders.path(number))
            sizes[number], times[number] = facts.st_size, facts.st_mtime_ns

    step = 1000
    with ThreadPoolExecutor(_ASKING) as pool:
        list(pool.map(ask, (range(at, min(at + step, len(sizes))) for at in range(0, len(sizes), step))))
    return sizes, times


def _same_classes(parts: dict[str, Part], split: dict[str, Path]) -> dict[str, Part]:
    """Give validation the labels of training: a class that it lacks keeps its number."""
    train, val = parts["train"], parts.get("val")
    if not isinstance(train, ImagePart) or not isinstance(val, ImagePart) or not (train.classes and val.classes):
        return parts
    unknown = [name for name in val.classes if name not in train.classes]
    if unknown:
        raise PackError(
            f"{split['val']} has {len(unknown)} class folder(s) that {split['train']} has not: "
            f"{', '.join(unknown[:3])}. Nothing could be learnt of them. Move them away, or add them to training."
        )
    places = np.array([train.classes.index(name) for name in val.classes], np.int32)
    classes, found = train.classes, val.find
    parts["val"] = replace(
        val,
        classes=classes,
        digest=hashlib.sha256(repr((val.digest, classes)).encode()).hexdigest(),
        find=lambda workers: _relabelled(found(workers), classes, places),
    )
    return parts


def _relabelled(samples: Samples, classes: tuple[str, ...], places: NDArray[np.int32]) -> Samples:
    return replace(samples, classes=classes, label=places[samples.label])
