"""Packs text as tokens: runs of equal length in the order of the documents, where any sequence has its place."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from azureml_strategy.data.packing.parts import Part
from azureml_strategy.data.packing.shards import PackError, Record, Records, atomic_write
from azureml_strategy.data.packing.workers import Task
from azureml_strategy.data.tokens import Corpus, Tokenizer, make_tokenizer
from azureml_strategy.files import read_whole

# Bytes of a record: large enough to read at the rate of the storage, small enough to read for one sequence.
RUN_BYTES = 64 * 2**10
# Bytes of the documents that are encoded at once by one process.
_GROUP_BYTES = 16 * 2**20


@dataclass(frozen=True)
class TokenizerChoice:
    """How text becomes tokens, by the arguments of `make_tokenizer`. Each process makes the tokenizer itself."""

    name: str | None
    end_of_text: str | None

    def make(self) -> Tokenizer:
        """Make the tokenizer."""
        return make_tokenizer(self.name, self.end_of_text)


@dataclass
class TokenPart(Part):
    """The documents for training, or for validation."""

    documents: Sequence[Path]
    choice: TokenizerChoice
    facts: dict[str, Any]  # what the index records of the tokenizer and the split
    digest: str

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of documents."""
        return len(self.documents)

    @override
    def tasks(self, work: Path) -> Sequence[Task]:
        folder = work / "tokens"
        folder.mkdir(exist_ok=True)
        return [
            EncodeTask(group, self.choice, folder / f"{number:06}.bin")
            for number, group in enumerate(_groups(self.documents))
        ]

    @override
    def examples(self) -> Iterator[bytes]:
        return (read_whole(document) for document in self.documents)

    @override
    def records(self, work: Path, workers: int) -> Records:
        records = TokenRecords(work / "tokens", json.dumps(self.facts))
        if not len(records):
            raise PackError(f"{self.documents[0]} and what follows it have no tokens. Is it the right tokenizer?")
        return records


@dataclass(frozen=True)
class EncodeTask:
    """Documents that follow one another, to be written as tokens."""

    documents: tuple[Path, ...]
    choice: TokenizerChoice
    target: Path  # the file of their tokens

    def is_done(self) -> bool:
        """Whether an earlier run has written them."""
        return self.target.is_file()

    def run(self, advance: Callable[[], None]) -> None:
        """Write them, all or nothing.

        Raises:
            CorpusError: a document cannot be read as text.
        """
        tokenizer = self.choice.make()
        with atomic_write(self.target) as file:
            for document in self.documents:
                file.write(tokenizer.encode(document).tobytes())
                advance()


@dataclass(frozen=True)
class TokenRecords(Records):
    """Runs of tokens."""

    folder: Path  # of the files that `EncodeTask` has written
    described: str  # JSON of what the index records of the tokenizer and the split
    kind = "tokens"
    noun = "runs of tokens"
    shuffled = False
    classes = ()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "described": self.described}

    @cached_property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(str(json.loads(self.described)["dtype"]))

    @cached_property
    def _files(self) -> tuple[list[Path], list[int]]:
        """The files of tokens, and the number of the first token of each, with the number of all tokens at the end."""
        paths = sorted(self.folder.glob("*.bin"))
        counts = (path.stat().st_size // self._dtype.itemsize for path in paths)
        return paths, list(accumulate(counts, initial=0))

    @property
    def _run(self) -> int:
        return RUN_BYTES // self._dtype.itemsize

    @override
    def __len__(self) -> int:
        return -(-self._files[1][-1] // self._run)

    @override
    def record(self, number: int) -> Record:
        start, stop = number * self._run, (number + 1) * self._run
        paths, starts = self._files
        first = int(np.searchsorted(starts, start, side="right")) - 1
        parts = []
        for path, begins, ends in zip(paths[first:], starts[first:], starts[first + 1 :], strict=False):
            if begins >= stop:
                break
            place = max(start, begins) - begins
            count = min(stop, ends) - begins - place
            parts.append(np.fromfile(path, self._dtype, count, offset=place * self._dtype.itemsize))
            if len(parts[-1]) < count:
                raise PackError(f"{path} gave {len(parts[-1])} of {count} tokens from token {place} on. Pack anew.")
        written = io.BytesIO()
        np.save(written, np.concatenate(parts))
        return Record("npy", written.getvalue(), None)

    @override
    def name(self, number: int) -> str:
        return f"run {number}"

    @override
    def mean_bytes(self, order: NDArray[np.int64]) -> float:
        return RUN_BYTES

    @override
    def facts(self) -> dict[str, Any]:
        return {**json.loads(self.described), "tokens": self._files[1][-1], "run": self._run}


def find_text(corpus: Corpus, choice: TokenizerChoice, validation_fraction: float) -> dict[str, Part]:
    """Return the documents for training and for validation, as `TextDataModule` splits them.

    Raises:
        CorpusError: no document is left for training, or there is no such tokenizer.
    """
    tokenizer = choice.make()
    facts = {
        "dtype": tokenizer.dtype.name,
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "validation_fraction": validation_fraction,
    }
    digest = hashlib.sha256(repr((corpus.identity(), tokenizer.identity, validation_fraction)).encode()).hexdigest()
    parts = zip(("train", "val"), corpus.split(validation_fraction), strict=True)
    return {name: TokenPart(documents, choice, facts, digest) for name, documents in parts if documents}


def _groups(documents: Sequence[Path]) -> Iterator[tuple[Path, ...]]:
    group: list[Path] = []
    size = 0
    for document in documents:
        group.append(document)
        size += os.path.getsize(document)
        if size >= _GROUP_BYTES:
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)
