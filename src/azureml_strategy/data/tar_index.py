"""Indexes WebDataset tar files that were packed by something else and have no index. Each is read once."""

from __future__ import annotations

import asyncio
import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray
from typing_extensions import Buffer, override

from azureml_strategy.data.shard_index import PASSED_OVER, ShardIndex, ShardIndexError, numbered_classes
from azureml_strategy.data.skipped import PassedOver, is_no_data

if TYPE_CHECKING:
    from azureml_strategy.data.storage import Storage

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp")
CLASSES_NAME = "classes.txt"
# Bytes that are asked for at once: storage answers large ranges at the rate of the network.
_RANGE = 8 * 2**20
# Shards that are read at once from storage.
_AT_ONCE = 8
# First bytes of what is no plain tar: https://en.wikipedia.org/wiki/List_of_file_signatures
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_COMPRESSED_NAMES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_AGAIN = "Copy it again, or pack the data set anew: azureml-strategy data pack SRC OUT."
# An index counts the bytes of a record by 32 bits.
_LONGEST_RECORD = 2**32 - 1
_LONGEST_SHOWN = 100
_SPLIT = re.compile(r"(?:^|[^a-z])(train|val|validation|valid|test)(?![a-z])", re.IGNORECASE)

Read = Callable[[int, int], Buffer]


class ShardSamples(NamedTuple):
    """The samples of one shard; the arrays are as those of `ShardIndex`."""

    offset: NDArray[np.int64]
    length: NDArray[np.uint32]
    checksum: NDArray[np.uint32]
    labels: Sequence[int | str]  # as the files give them: numbers, or names of classes
    raw: bool  # whether the samples are pixels in numpy's format, not image files
    suffix: str  # of the files that give the labels: `cls` or `json`
    others: Sequence[int | str | None]  # labels in `.json` files beside `.cls` files, None for a sample without one
    alone: PassedOver  # files of samples without an image
    unread: Counter[str]  # how many files of each other suffix lie beside images


def index_tars(folder: Path, workers: int = 1, names: Iterable[str] | None = None) -> ShardIndex:
    """Index the tar files directly in a folder.

    Args:
        folder: with tar files of `KEY.jpg` (or .jpeg, .png, .webp, .bmp; .npy for pixels) beside `KEY.cls` or
            `KEY.json`, and a `classes.txt` where the classes have names: a line each, in the order of their labels.
        workers: processes that read.
        names: of the files to index; all tar files by default.

    Raises:
        ShardIndexError: there are no tar files, or one is truncated, compressed, or holds something else.
    """
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    shards = shard_names(sizes, str(folder)) if names is None else sorted(names)
    paths = [folder / name for name in shards]
    if workers == 1:
        found = list(map(_index_file, paths))
    else:
        with ProcessPoolExecutor(min(workers, len(paths)), get_context("spawn")) as pool:
            found = list(pool.map(_index_file, paths))
    classes = (folder / CLASSES_NAME).read_bytes() if CLASSES_NAME in sizes else None
    return _join(shards, sizes, found, classes)


async def index_storage(storage: Storage) -> ShardIndex:
    """Index the tar files of a storage, as `index_tars`. Every byte is read once, by large ranges.

    Raises:
        ShardIndexError: as of `index_tars`.
        StorageError: the storage cannot be reached, or refuses.
    """
    sizes = await storage.list()
    shards = shard_names(sizes, storage.address)
    loop = asyncio.get_running_loop()
    # Not the loop's own, of which there are few: these wait for reads, and a read may need one to renew its credential.
    threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="index")

    async def index(name: str) -> ShardSamples:
        def read(start: int, length: int) -> Buffer:
            return asyncio.run_coroutine_threadsafe(storage.read(name, start, length), loop).result()

        return await loop.run_in_executor(threads, index_shard, read, sizes[name], name)

    try:
        found = await asyncio.gather(*(index(name) for name in shards))
    finally:
        # In a thread: after an error, the threads that still run ask the loop for their reads.
        await asyncio.to_thread(threads.shutdown, cancel_futures=True)
    classes = None
    if CLASSES_NAME in sizes:
        classes = bytes(await storage.read(CLASSES_NAME, 0, sizes[CLASSES_NAME]))
    return _join(shards, sizes, found, classes)


def is_indexed(name: str) -> bool:
    """Whether an index is made of a file of this name: a tar, or the names of the classes."""
    return name == CLASSES_NAME or (name.endswith(".tar") and not name.startswith("."))


def shard_names(files: Iterable[str], where: str) -> list[str]:
    """Return the tar files among the files of a set, sorted.

    Raises:
        ShardIndexError: there are none, or they are of training and of validation.
    """
    files = list(files)
    shards = sorted(name for name in files if is_indexed(name) and name != CLASSES_NAME)
    if not shards:
        compressed = sorted(name for name in files if name.endswith(_COMPRESSED_NAMES))
        raise ShardIndexError(
            f"{where} holds compressed tar files ({compressed[0]}), in which no sample can be read by its place. "
            "Decompress them: gunzip, unxz or zstd -d; images are compressed already."
            if compressed
            else f"There is no tar file in {where}. Pack the data set: azureml-strategy data pack SRC OUT."
        )
    splits = {split_of(name) for name in shards} - {None}
    if len(splits) > 1:
        raise ShardIndexError(
            f"{where} holds shards of {' and '.join(sorted(filter(None, splits)))}, which are several sets. Move each "
            "into a folder of its own, or pack them: azureml-strategy data pack SRC OUT makes OUT/train and OUT/val."
        )
    return shards


def split_of(name: str) -> str | None:
    """Return the split that the last such word of a path names: `train`, `val` or `test`; None if there is none."""
    found = _SPLIT.findall(name)
    if not found:
        return None
    word = str(found[-1]).lower()
    return "val" if word.startswith("val") else word


def index_shard(read: Read, size: int, name: str) -> ShardSamples:
    """Index one tar of `size` bytes, whatever its headers are: USTAR, GNU or pax. `read` takes start and length.

    Raises:
        ShardIndexError: it is truncated, compressed, or holds something else than labelled images.
    """
    with io.BufferedReader(_Ranges(read, size), _RANGE) as file:
        return _index(cast(BinaryIO, file), size, name)


def _index_file(path: Path) -> ShardSamples:
    with path.open("rb", buffering=_RANGE) as file:
        return _index(file, path.stat().st_size, path.name)


class _Ranges(io.RawIOBase):
    """A file that is read by ranges from somewhere else."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size
        self._position = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        length = max(0, min(len(view), self._size - self._position))
        if length:
            view[:length] = self._read(self._position, length)
        self._position += length
        return length


@dataclass
class _ShardFiles:
    """The files of one shard, by the keys of their samples."""

    shard: str
    records: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    suffixes: set[str] = field(default_factory=set)
    classes: dict[str, int | str] = field(default_factory=dict)
    described: dict[str, int | str] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)

    def add(self, name: str, offset: int, content: bytes) -> None:
        key, suffix = _split_name(name)
        if len(content) > _LONGEST_RECORD:
            raise self.error(name, f"{len(content):,} bytes long. An image has at most {_LONGEST_RECORD:,}.")
        if suffix in IMAGE_SUFFIXES or suffix == "npy":
            if key in self.records:
                raise self.error(name, "a second image of this key. Each sample has one image: give it another key.")
            self.records[key] = (offset, len(content), crc32(content))
            self.suffixes.add(suffix)
        elif suffix == "cls":
            if key in self.classes:
                raise self.error(name, "a second label of this key. Give each sample a key of its own.")
            self.classes[key] = _label(content.decode("utf-8", "replace"))
        elif suffix == "json":
            try:
                parsed = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise self.error(name, f"no JSON: {_shown(str(error))}. {_AGAIN}") from error
            label = parsed.get("label", parsed.get("cls")) if isinstance(parsed, dict) else None
            if isinstance(label, int | str):
                self.described[key] = label
            else:
                self.rest.append(name)
        elif not any(map(is_no_data, name.split("/"))):
            self.rest.append(name)

    def error(self, entry: str, reason: str) -> ShardIndexError:
        return ShardIndexError(f"{self.shard}: {_shown(entry)} is {reason}")

    def samples(self) -> ShardSamples:
        if not self.records:
            kinds = ", ".join(f".{suffix}" for suffix in IMAGE_SUFFIXES)
            raise ShardIndexError(
                f"{self.shard} holds no image ({kinds}). Remove it, or give the folder of the images."
            )
        labels = self.classes or self.described
        self._check_labels(labels)
        if "npy" in self.suffixes and len(self.suffixes) > 1:
            raise ShardIndexError(f"{self.shard} holds .npy files beside images. Make two sets of them.")
        offset, length, checksum = np.array(list(self.records.values()), np.int64).T
        arrays = (offset, length.astype(np.uint32), checksum.astype(np.uint32))
        given = [labels[key] for key in self.records]
        suffix = "cls" if self.classes else "json"
        others = [self.described.get(key) for key in self.records] if self.classes and self.described else []
        return ShardSamples(*arrays, given, "npy" in self.suffixes, suffix, others, *self._passed_over())

    def _check_labels(self, labels: Mapping[str, int | str]) -> None:
        truth = next((key for key, label in labels.items() if isinstance(label, bool)), None)
        if truth is not None:
            raise ShardIndexError(
                f"{self.shard}: the label in {_shown(truth)}.json is {json.dumps(labels[truth])}, which is no class. "
                'Write the number of the class, "label": 1, or its name.'
            )
        missing = next((key for key in self.records if key not in labels), None)
        if missing is not None:
            raise ShardIndexError(
                f"{self.shard}: the image {_shown(missing)} has no label. A sample is KEY.jpg beside KEY.cls, a text "
                "file with the number of its class, or KEY.json with a `label`. Add them, or pack the images from "
                "class folders."
            )
        alone = next((key for key in self.classes if key not in self.records), None)
        if alone is not None:
            raise ShardIndexError(f"{self.shard}: the label {_shown(alone)}.cls has no image. {_AGAIN}")

    def _passed_over(self) -> tuple[PassedOver, Counter[str]]:
        """Return files of samples without an image, and how many of each suffix lie unread beside images."""
        alone, unread = PassedOver(), Counter[str]()
        for name in sorted([*self.rest, *(f"{key}.json" for key in self.described)]):
            key, suffix = _split_name(name)
            if key not in self.records:
                alone.add(f"{self.shard}: {_shown(name)}")
            elif suffix != "json":  # it was read, whatever it says
                unread[f".{_shown(suffix)}"] += 1
        return alone, unread


class Entry(NamedTuple):
    """A file in a tar, or a link or device."""

    name: str  # in the tar, such as `images/1.jpg`
    offset: int  # where its content begins, bytes
    content: bytes | None  # None for a link or a device


def read_tar(file: BinaryIO, size: int, name: str) -> Iterator[Entry]:
    """Read a tar of `size` bytes to its end. No header makes it read, or allocate memory for, more than there is.

    Raises:
        ShardIndexError: it is truncated, damaged or compressed, or has a file that is kept in parts.
    """
    start = file.read(8)
    for signature, kind in _COMPRESSED.items():
        if start.startswith(signature):
            raise ShardIndexError(
                f"{name} is compressed by {kind}, and no sample can be read by its place. Decompress it: gunzip, "
                "bunzip2, unxz or zstd -d; images are compressed already."
            )
    file.seek(0)
    entry = "its first entry"
    try:
        with tarfile.open(fileobj=cast(BinaryIO, _Bounded(file, size)), mode="r:") as tar:
            while (member := tar.next()) is not None:
                entry = _shown(member.name)
                if member.size < 0 or member.issparse():
                    raise tarfile.ReadError(f"{entry} is kept in parts" if member.issparse() else "a negative size")
                if member.isreg() and member.offset_data + member.size > size:
                    raise ShardIndexError(f"{name} ends within {entry}: it is truncated. {_AGAIN}")
                if not member.isdir():
                    file.seek(member.offset_data)
                    content = file.read(member.size) if member.isreg() else None
                    yield Entry(member.name, member.offset_data, content)
                tar.members = []  # type: ignore[attr-defined]  # they would all stay in memory
            _check_end(file, tar.offset, size, name, entry)
    except ShardIndexError:
        raise
    # Python's reader of tars lets errors through that its parsing of numbers and texts raises.
    except (tarfile.TarError, ValueError, OverflowError, LookupError, RecursionError) as error:
        reason = _shown(str(error)) or type(error).__name__
        raise ShardIndexError(f"{name} is damaged at or after {entry}: {reason}. {_AGAIN}") from error


class _Bounded:
    """A file that is read up to its end, whatever size a header claims. tarfile needs no other methods than these."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.tell, self.seek = file.tell, file.seek

    def read(self, size: int) -> bytes:
        if size < 0:
            raise tarfile.ReadError("a negative size")
        return self._file.read(min(size, max(0, self._size - self._file.tell())))


def _shown(text: str) -> str:
    """Return a name or a reason as a message may show it. Names in tars may be any bytes, and of any length."""
    shown = text if text.isprintable() else repr(text)[1:-1]
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."


def _index(file: BinaryIO, size: int, name: str) -> ShardSamples:
    files = _ShardFiles(name)
    for entry in read_tar(file, size, name):
        if entry.content is None:
            files.rest.append(entry.name)
        else:
            files.add(entry.name, entry.offset, entry.content)
    return files.samples()


def _check_end(file: BinaryIO, offset: int, size: int, name: str, last: str) -> None:
    """Check that a tar ends where Python's reader has stopped, which is at the first block that is no header."""
    file.seek(offset)
    if offset >= size:
        raise ShardIndexError(f"{name} ends after {last} without a tar's mark of the end: it is truncated. {_AGAIN}")
    while block := file.read(_RANGE):
        if any(block):
            raise ShardIndexError(f"{name} is damaged after {last}: at byte {offset} is no header of a tar. {_AGAIN}")


def _split_name(name: str) -> tuple[str, str]:
    """Return key and suffix as WebDataset has them: the suffix begins at the first dot after the last slash."""
    folder, slash, file = name.rpartition("/")
    key, _, suffix = file.partition(".")
    return f"{folder}{slash}{key}", suffix.lower()


def _label(text: str) -> int | str:
    text = text.strip()
    return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else text  # Python converts some 4,300 digits


def _join(
    shards: Sequence[str], sizes: Mapping[str, int], found: Sequence[ShardSamples], names: bytes | None
) -> ShardIndex:
    classes = _class_names(names) if names is not None else ()
    kinds = {samples.raw for samples in found}
    if len(kinds) > 1:
        raise ShardIndexError("Some of the tar files hold images and others pixels (.npy). Make two sets of them.")
    of_suffix = {samples.suffix: name for name, samples in zip(shards, found, strict=True)}
    if len(of_suffix) > 1:
        raise ShardIndexError(
            f"The labels of {of_suffix['cls']} are in .cls files, and those of {of_suffix['json']} in .json files. "
            "They may count differently: write .cls files for all images of the set, or make two sets."
        )
    numbers = [_numbers(name, samples, classes) for name, samples in zip(shards, found, strict=True)]
    label = np.concatenate(numbers)
    arrays: dict[str, Any] = {
        each: np.concatenate([getattr(samples, each) for samples in found]) for each in ("offset", "length", "checksum")
    }
    return ShardIndex(
        "raw" if kinds.pop() else "images",
        tuple(shards),
        np.array([sizes[name] for name in shards], np.int64),
        np.repeat(np.arange(len(shards), dtype=np.uint32), [len(samples.offset) for samples in found]),
        label=label,
        **arrays,
        classes=classes or numbered_classes("The tar files", label),
        facts=_passed_over(found, sizes),
    )


def _passed_over(found: Sequence[ShardSamples], files: Iterable[str]) -> dict[str, Any]:
    """Return what was not read, as an index records it; an empty mapping if all was read."""
    alone, unread = PassedOver(), sum((samples.unread for samples in found), Counter[str]())
    for name in sorted(files):
        is_tar = name.lower().endswith((".tar", *_COMPRESSED_NAMES))
        if is_tar and not is_indexed(name) and not is_no_data(name):
            alone.add(name)
    alone.extend(samples.alone for samples in found)
    return {PASSED_OVER: {**asdict(alone), "unread": dict(unread)}} if alone or unread else {}


def _class_names(content: bytes) -> tuple[str, ...]:
    """Return the names of the classes in a `classes.txt`, a line each."""
    try:
        names = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ShardIndexError(f"{CLASSES_NAME} is no UTF-8, at byte {error.start:,}. Write it as UTF-8.") from error
    while names and not names[-1].strip():
        names.pop()
    blank = next((number for number, name in enumerate(names, 1) if not name.strip()), None)
    if blank is not None:
        raise ShardIndexError(
            f"Line {blank} of {CLASSES_NAME} is blank, and each line is the name of a class. Remove it, or where a "
            "class has no name, write one: the place of a line is the label."
        )
    return tuple(names)


def _numbers(shard: str, samples: ShardSamples, classes: tuple[str, ...]) -> NDArray[np.int32]:
    """Return the labels of a shard as places of classes."""
    labels = samples.labels
    # A number may be the place of one class and the name of another: of the classes 1, 10 and 2, what is 1?
    named = {number: place for place, name in enumerate(classes) if isinstance(number := _label(name), int)}
    unclear = next((label for label in labels if isinstance(label, int) and named.get(label, label) != label), None)
    if unclear is not None:
        raise ShardIndexError(
            f"{shard}: the label {unclear} may be the place of a class in {CLASSES_NAME}, counted from 0, or the class "
            f"of that name, at place {named[unclear]}. If the labels are places, rename the classes: "
            f"sed -i 's/^/class /' {CLASSES_NAME}. If they are names, "
            "write the place of its class into each .cls file, and rename them."
        )
    places = {name: number for number, name in enumerate(classes)}
    numbers = [label if isinstance(label, int) else places.get(label, -1) for label in labels]
    most = len(classes) if classes else 2**31
    wrong = next((place for place, number in enumerate(numbers) if not 0 <= number < most), None)
    if wrong is not None:
        raise ShardIndexError(
            f"{shard}: the label of sample {wrong} is {_shown(repr(labels[wrong]))}, "
            + (f"which is none of the {len(classes)} classes of {CLASSES_NAME}." if classes else "not a number from 0.")
            + f" Write the numbers of the classes into the .cls files, and their names into {CLASSES_NAME}, one a line."
        )
    # A text in a .json beside a .cls may be anything, such as a caption. It counts if it is a name in classes.txt.
    others = [places.get(other) if isinstance(other, str) else other for other in samples.others]
    for place, (number, other) in enumerate(zip(numbers, others, strict=False)):
        if other is not None and not isinstance(other, bool) and other != number:
            raise ShardIndexError(
                f"{shard}: by its .cls file, the label of sample {place} is {labels[place]!r}, and by its .json file "
                f"{_shown(repr(samples.others[place]))}. Correct one of them, or remove the .json files."
            )
    return np.array(numbers, np.int32)
