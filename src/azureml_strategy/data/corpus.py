"""Finding the documents of a text data set."""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from azureml_strategy.data.folders import resolve_root

# Parts of the standard library's folder that are not it, or that hold texts made to be malformed.
_NOT_STANDARD = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_SPLIT_SEED = 0


class CorpusError(ValueError):
    """Text to train on is missing, too little or unreadable; the message says which."""


@dataclass(frozen=True)
class Corpus:
    """Documents, one a file, in the order of their names.

    Attributes:
        root: the folder below which they lie, or the only file.
        documents: their paths; none of them is empty.
    """

    root: Path
    documents: tuple[Path, ...]

    def identity(self) -> str:
        """A hash of names, sizes and times of change: another one where a document was changed, added or removed."""
        digest = hashlib.sha256()
        for path in self.documents:
            facts = path.stat()
            digest.update(f"{path.relative_to(self.root)}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def split(self, validation_fraction: float) -> tuple[Sequence[Path], Sequence[Path]]:
        """Whole documents for training and for validation, the same ones at every call.

        Args:
            validation_fraction: share of the documents for validation, from 0; one at least where it is above 0.

        Raises:
            CorpusError: there is no document left for training.
        """
        total = len(self.documents)
        count = max(1, round(total * validation_fraction)) if validation_fraction else 0
        if count >= total:
            raise CorpusError(
                f"{self.root} has {total} document(s), of which validation_fraction={validation_fraction} takes "
                f"{count} for validation: none is left for training. A document is a file: cut the text into several, "
                "or set data.validation_fraction=0."
            )
        validation = set(random.Random(_SPLIT_SEED).sample(range(total), count))
        train = [path for number, path in enumerate(self.documents) if number not in validation]
        return train, [self.documents[number] for number in sorted(validation)]


def find_corpus(
    root: str | os.PathLike[str] | None, input_name: str | None, pattern: str, environ: Mapping[str, str]
) -> Corpus:
    """The user's documents, or where neither root nor input is given the source of Python's standard library.

    Args:
        root: a folder, or one file.
        input_name: name of an input of the Azure ML job.
        pattern: which files below the folder are documents, as `*.txt`; hidden ones never are.
        environ: the process's environment variables.

    Raises:
        CorpusError: nothing is there, or nothing but empty files.
        DataFolderError: the job has no such input.
    """
    if root is None and input_name is None:
        folder = Path(sysconfig.get_path("stdlib"))
        return _corpus(folder, _standard_library(folder), "*.py")
    folder = resolve_root(root, input_name, environ).expanduser()
    if folder.is_file():
        return _corpus(folder, [folder], folder.name)
    if not folder.is_dir():
        raise CorpusError(f"There is no folder or file {folder}. Give the text as data.root=... or data.input_name=...")
    return _corpus(folder, folder.rglob(pattern), pattern)


def _standard_library(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        # Not entered at all: there may be a hundred times as many files in site-packages.
        folders[:] = (name for name in folders if name not in _NOT_STANDARD)
        yield from (Path(place, name) for name in files if name.endswith(".py"))


def _corpus(root: Path, found: Iterable[Path], pattern: str) -> Corpus:
    files = sorted(path for path in found if path.is_file() and not _hidden(path.relative_to(root)))
    documents = tuple(path for path in files if path.stat().st_size)
    if not documents:
        seen = f"{len(files)} file(s) that match {pattern!r}, all of them empty" if files else f"no file {pattern!r}"
        raise CorpusError(f"{root} has {seen}. Give another folder, data.root=..., or data.pattern='*.md', say.")
    return Corpus(root, documents)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
