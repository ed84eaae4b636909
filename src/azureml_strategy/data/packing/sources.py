"""Finds the images that are to be packed: class folders, WebDataset tars, or a data set of Hugging Face."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from typing_extensions import override

from azureml_strategy.data.folders import file_digest, scan_class_folders
from azureml_strategy.data.packing.images import ImageForm, Samples, image_records, refuse_full_size
from azureml_strategy.data.packing.parts import Part, by_split, split_folders
from azureml_strategy.data.packing.shards import PackError, Records
from azureml_strategy.data.packing.tables import find_tables
from azureml_strategy.data.readers import find_index
from azureml_strategy.data.shard_index import INDEX_NAME, warn_of_unread_files
from azureml_strategy.data.tar_index import index_tars, read_tar
from azureml_strategy.files import is_one_line

# Threads that ask for sizes: on a mount each waits for the network.
_THREADS = 32
# Images that are looked at where all of them would take too long.
_EXAMPLES = 100


@dataclass
class ImagePart(Part):
    """Images that lie in files already, and need not be unpacked; `root`, `classes` and `unit` as in `Samples`."""

    root: str
    classes: tuple[str, ...]
    digest: str
    find: Callable[[int], Samples]  # by so many processes: it may have to read all files
    first: Callable[[], Iterator[bytes]]  # returns some of the images, quickly
    form: ImageForm
    unit: str = ""

    @override
    def examples(self) -> Iterator[bytes]:
        return self.first()

    @override
    def records(self, work: Path, workers: int) -> Records:
        return image_records(work, self.root, self.unit, self.form, lambda: self.find(workers))


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
    tables = find_tables(source, form)
    if tables:
        return tables
    split = split_folders(source)
    if split:
        parts: dict[str, Part] = {}
        for name, folder in split.items():
            tars = _tars(folder)
            parts[name] = _tar_part(folder, tars, form) if tars else _folder_part(folder, form)
        return _same_classes(parts, split)
    tars = _tars(source)
    if tars:
        return {name: _tar_part(source, own, form) for name, own in by_split(tars, source).items()}
    return {"": _folder_part(source, form)}


def _tars(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.glob("*.tar") if not path.name.startswith(".") and path.is_file())
    if not found:
        # Class folders have no such files, so these are compressed tars.
        compressed = next(iter(sorted(folder.glob("*.tar.*"))), None) or next(iter(sorted(folder.glob("*.tgz"))), None)
        if compressed is not None:
            raise PackError(f"{compressed} is compressed. Decompress it first (gunzip, unxz, zstd -d), or extract it.")
    return found


def _tar_part(folder: Path, names: list[str], form: ImageForm) -> Part:
    def find(workers: int) -> Samples:
        indexed = (folder / INDEX_NAME).is_file()
        index = find_index(folder) if indexed else index_tars(folder, workers, names)
        if index.kind != "images":
            raise PackError(f"{folder} holds {index.kind}, which are packed already. Pack what they were made of.")
        warn_of_unread_files(str(folder), index)
        files = np.array([os.fsencode(name) for name in index.shards], np.bytes_)
        length = index.length.astype(np.int64)
        arrays = (files, files, index.shard, index.offset, length, index.label, index.offset)
        return Samples(str(folder), index.classes, *arrays, unit="byte")

    def first() -> Iterator[bytes]:
        path = folder / names[0]
        with path.open("rb") as file:
            for entry in islice(read_tar(file, path.stat().st_size, path.name), _EXAMPLES):
                if entry.content is not None:
                    yield entry.content

    return ImagePart(str(folder), (), file_digest(folder, names), find, first, form, "byte")


def _folder_part(folder: Path, form: ImageForm) -> Part:
    folders = scan_class_folders(folder)
    odd = next((name for name in folders.classes if not is_one_line(name)), None)
    if odd is not None:
        raise PackError(
            f"{folders.root} has a class folder {odd!r}, and the names of classes are lines of a text. Rename it."
        )
    count = len(folders.names)
    sizes, times = np.zeros(count, np.int64), np.zeros(count, np.int64)

    def ask(numbers: range) -> None:
        for number in numbers:
            facts = os.stat(folders.path(number))
            sizes[number], times[number] = facts.st_size, facts.st_mtime_ns

    step = 1000
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(ask, (range(at, min(at + step, count)) for at in range(0, count, step))))
    digest = hashlib.sha256(repr((folders.classes, folders.names.dtype)).encode())
    for array in (folders.names, folders.labels, sizes, times):
        digest.update(np.ascontiguousarray(array).data)
    numbers, nothing = np.arange(count, dtype=np.uint32), np.zeros(count, np.int64)
    arrays = (folders.names, folders.names, numbers, nothing, sizes, folders.labels.astype(np.int32), nothing)
    samples = Samples(folders.root, folders.classes, *arrays)
    some = np.linspace(0, count - 1, min(_EXAMPLES, count), dtype=np.int64).tolist()
    return ImagePart(
        folders.root,
        folders.classes,
        digest.hexdigest(),
        lambda workers: samples,
        lambda: (samples.read(number) for number in some),
        form,
    )


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
    classes, find_val = train.classes, val.find

    def find(workers: int) -> Samples:
        samples = find_val(workers)
        return replace(samples, classes=classes, label=places[samples.label])

    digest = hashlib.sha256(repr((val.digest, classes)).encode()).hexdigest()
    parts["val"] = replace(val, classes=classes, digest=digest, find=find)
    return parts
