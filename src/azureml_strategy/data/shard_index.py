"""The index of a packed data set: where each sample lies in its shards, what it is, and its checksum.

A packed set is a folder of tar files in WebDataset's convention, `KEY.jpg` beside `KEY.cls`, and one `index.npz`. A
tar is only a row of files with a header each, so that a sample is read by its offset, without the tar's own code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from azureml_strategy.data.npy_files import read_npz
from azureml_strategy.data.skipped import first_names, warn
from azureml_strategy.files import OutsideError, name_within

INDEX_NAME = "index.npz"
# The fact in an index that was made of tars which were there already: their names, sizes and times.
MADE_OF = "made_of"
# The fact that counts the files in such tars that belong to no sample.
PASSED_OVER = "passed_over"
# The largest label of a set whose classes have no names: each number up to it becomes a class. Our choice: more classes
# than any published set of images has.
_LARGEST_LABEL = 2**20 - 1
# Version of the layout. A newer one is refused, as this code would misread it.
_VERSION = 1
_ARRAYS = {"shard": np.uint32, "offset": np.int64, "length": np.uint32, "label": np.int32, "checksum": np.uint32}


class ShardIndexError(ValueError):
    """An index is missing, damaged or contradicts its shards. The message says which and what to do."""


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """A packed data set, sample by sample: 24 bytes each, in arrays that worker processes share.

    Attributes:
        kind: what a record is: `images` (encoded: JPEG, PNG, ...), `raw` (uint8 pixels, height x width x 3, in numpy's
            .npy format), or `tokens` (a run of tokens in .npy format).
        shards: names of the tar files, relative to the folder of the set.
        sizes: int64 `(shards,)`, bytes of each.
        shard: uint32 `(samples,)`, the number of the shard that holds a sample. It never falls: samples lie in the
            order of the shards.
        offset: int64 `(samples,)`, where the record begins in its shard, bytes. It rises within a shard.
        length: uint32 `(samples,)`, bytes of the record.
        label: int32 `(samples,)`, the number of the class; 0 where there are none.
        checksum: uint32 `(samples,)`, CRC-32 of the record, as zlib's.
        classes: names of the classes; the place of a class is its label.
        facts: what else was recorded when the set was packed, JSON only: `resize`, `quality`, `dtype`, ...
    """

    kind: str
    shards: tuple[str, ...]
    sizes: NDArray[np.int64]
    shard: NDArray[np.uint32]
    offset: NDArray[np.int64]
    length: NDArray[np.uint32]
    label: NDArray[np.int32]
    checksum: NDArray[np.uint32]
    classes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an index that cannot be true.

        Raises:
            ShardIndexError: a record lies outside of its shard, a shard outside of the folder, a label is that of no
                class, or the arrays do not belong together.
        """
        if len({len(getattr(self, name)) for name in _ARRAYS}) != 1 or len(self.sizes) != len(self.shards):
            raise ShardIndexError("its arrays have different lengths")
        if not len(self):
            raise ShardIndexError("it holds no samples")
        try:
            for name in self.shards:
                name_within(Path("the folder of the set"), name)
        except OutsideError as error:
            raise ShardIndexError(f"{error}. Rename it") from error
        if int(self.shard.max()) >= len(self.shards) or bool((self.shard[1:] < self.shard[:-1]).any()):
            raise ShardIndexError("its samples name shards that are not there, or are not in the order of the shards")
        if int(self.sizes.min()) < 0 or float(self.sizes.sum(dtype=np.float64)) >= 2**62:
            raise ShardIndexError("its shards have sizes that no disk holds")
        # Not offset + length, which may be more than an int64 holds.
        if bool((self.offset > self.sizes[self.shard] - self.length).any()) or int(self.offset.min()) < 0:
            raise ShardIndexError("a sample lies outside of its shard")
        if int(self.label.min()) < 0 or (self.classes and int(self.label.max()) >= len(self.classes)):
            raise ShardIndexError("a sample has a label that is no place of a class")

    def __len__(self) -> int:
        return len(self.shard)

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits."""
        # Two facts are left out: the tars' times, which differ between copies, and the count of files that were passed
        # over, which an older version did not write.
        facts = {name: value for name, value in self.facts.items() if name not in (MADE_OF, PASSED_OVER)}
        digest = hashlib.sha256(self._header(facts).encode())
        for name in ("sizes", *_ARRAYS):
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        return digest.hexdigest()[:16]

    def name(self, number: int) -> str:
        """Say where a sample lies, for a message: `train-000003.tar, byte 1536`."""
        return f"{self.shards[self.shard[number]]}, byte {self.offset[number]}"

    def save(self, path: Path) -> None:
        """Write the index, all or nothing."""
        arrays = {name: getattr(self, name) for name in ("sizes", *_ARRAYS)}
        # Forked processes have equal addresses, and processes of two nodes may have equal numbers.
        scratch = path.with_name(f".{path.name}.{os.getpid()}.{id(self)}")
        try:
            with scratch.open("wb") as file:
                np.savez(file, header=np.frombuffer(self._header(self.facts).encode(), np.uint8), **arrays)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)

    def _header(self, facts: Mapping[str, Any]) -> str:
        parts = {"version": _VERSION, "kind": self.kind, "shards": self.shards, "classes": self.classes}
        return json.dumps({**parts, "facts": dict(facts)}, sort_keys=True)


def numbered_classes(where: str, label: NDArray[Any]) -> tuple[str, ...]:
    """Name the classes of a set by their numbers. `where` says in a message where the labels are from.

    Raises:
        ShardIndexError: a label would make more classes than any set has.
    """
    largest = int(label.max(initial=0))
    if largest > _LARGEST_LABEL:
        raise ShardIndexError(
            f"{where}: a label is {largest:,}, and labels count classes from 0, up to {_LARGEST_LABEL:,}. Number the "
            "classes anew, without gaps, or name them."
        )
    return tuple(map(str, range(largest + 1)))


def load_index(source: Path | bytes, where: str = "") -> ShardIndex:
    """Read an index from a file or its content. `where` is its name in messages, by default the path.

    Raises:
        ShardIndexError: there is none, or it is damaged, or of a newer version of this package.
    """
    where = where or (str(source) if isinstance(source, Path) else "The index")
    try:
        read = read_npz(source, ("header", "sizes", *_ARRAYS))
        header = json.loads(read.pop("header").tobytes())
        arrays = {name: _exactly(read[name], kind) for name, kind in {"sizes": np.int64, **_ARRAYS}.items()}
        if header["version"] > _VERSION:
            raise ShardIndexError(
                f"it has layout {header['version']}, and this azureml-strategy reads layout {_VERSION}: upgrade it"
            )
        classes, facts = tuple(header["classes"]), dict(header["facts"])
        if not all(isinstance(each, str) for each in (header["kind"], *header["shards"], *classes)):
            raise ValueError("a name in it is no text")
        return ShardIndex(header["kind"], tuple(header["shards"]), **arrays, classes=classes, facts=facts)
    except FileNotFoundError as error:
        raise ShardIndexError(
            f"There is no {where}. Pack the data set: azureml-strategy data pack SRC OUT. The folder OUT has it."
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardIndexError(
            f"{where} cannot be used: {error}. Copy it again from where the set was packed, or remove it, and the "
            "shards are indexed anew."
        ) from error


def _exactly(array: NDArray[Any], kind: type[Any]) -> NDArray[Any]:
    if array.ndim != 1 or array.dtype != kind:
        raise ValueError(f"it holds {array.dtype} of {array.ndim} dimensions in the place of numbers")
    return array


class RecordError(OSError):
    """A record of a packed set cannot be read, or is damaged. The message names its shard and place."""


@runtime_checkable
class ReadsAhead(Protocol):
    """What can fetch samples before they are read, if it is told which: packed shards
    behind the cache of the node. These methods, if inherited, do nothing."""

    def expect(self, numbers: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        """Take note of what this process and its workers read in this pass through the data, and in the next one."""
        return

    def reached(self, position: int) -> None:
        """Take note of how many samples of the pass have been handed out."""
        return


class RecordReader(ReadsAhead, Protocol):
    """Reads the records of a data set, in any process: it may be pickled, and used after a fork."""

    def read(self, numbers: Sequence[int]) -> list[bytes | Exception]:
        """Return records in the order asked for; in place of one that is damaged or cannot be read, the error."""

    def close(self) -> None:
        """Close files and connections. The next read opens them again."""
        return


def check_record(index: ShardIndex, number: int, content: bytes) -> bytes | RecordError:
    """Return what was read in the place of a record if it is as it was packed, else an error that says why not."""
    expected = int(index.length[number])
    if len(content) != expected:
        return RecordError(f"{index.name(number)}: the shard ends after {len(content)} of {expected} bytes")
    if crc32(content) != index.checksum[number]:
        return RecordError(f"{index.name(number)}: its {expected} bytes do not have the checksum of the index")
    return content


def warn_of_unread_files(root: str, index: ShardIndex) -> None:
    """Warn of the files in a set's tars that are part of no sample, as the index counts them."""
    facts = index.facts.get(PASSED_OVER)
    if facts is not None:
        warn(
            f"{root}: {len(index):,} samples are read, and passed over are {passed_over_text(facts)}. A sample is "
            "KEY.jpg, .jpeg, .png, .webp or .bmp with KEY.cls or KEY.json, in a .tar that is not compressed: pack anew "
            "what is to be read."
        )


def passed_over_text(facts: Mapping[str, Any]) -> str:
    """Say in words what an index counts in its fact `PASSED_OVER`."""
    suffixes = first_names([f"{suffix} ({count:,})" for suffix, count in Counter(facts["unread"]).most_common()])
    alone = f"{facts['count']:,} files that belong to no image: {first_names(facts['names'])}"
    beside = f"files beside images, of which only the image and its label count: {suffixes}"
    return "; and ".join(text for text, found in ((alone, facts["count"]), (beside, suffixes)) if found)
