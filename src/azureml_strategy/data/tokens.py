"""Text files as files of tokens, by a tokenizer or byte by byte."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from azureml_strategy.data.folders import resolve_root

_MANIFEST = "manifest.json"
# Of the layout below: another one is another folder.
_VERSION = 1

Tokens = NDArray[np.unsignedinteger[Any]]
# Between documents read as bytes: no text has this one.
_NUL = 0
# Parts of the standard library's folder that are not it, or that hold texts made to be malformed.
_NOT_STANDARD = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_SPLIT_SEED = 0


@dataclass(frozen=True)
class TokenFiles:
    """A folder with `train.bin`, `val.bin` and the manifest that these fields are read from.

    Attributes:
        folder: where they lie.
        dtype: of the tokens, as numpy names it.
        train: tokens for training.
        val: tokens for validation.
        digest: hash of all tokens, equal where two nodes read the same text with the same tokenizer.
    """

    folder: Path
    dtype: str
    train: int
    val: int
    digest: str

    def path(self, part: str) -> Path:
        """The file of `train` or `val`."""
        return self.folder / f"{part}.bin"


def token_folder(cache: Path, corpus: Corpus, tokenizer: Tokenizer, validation_fraction: float) -> Path:
    """The folder for these documents, this tokenizer and this split; another one if any of them changes."""
    facts = (_VERSION, corpus.identity(), tokenizer.identity, validation_fraction)
    return cache / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def write_tokens(folder: Path, corpus: Corpus, tokenizer: Tokenizer, validation_fraction: float) -> None:
    """Write the token files, all or nothing.

    They are written beside the folder and renamed into place: a process that is killed leaves no half data set,
    and where several write at once, on however many nodes, the first one wins and the others use its files.

    Args:
        folder: is left as it is where it exists.
        corpus: the documents.
        tokenizer: makes tokens of them.
        validation_fraction: share of the documents for validation.

    Raises:
        CorpusError: a document cannot be read, or none is left for training.
    """
    if folder.is_dir():
        return
    parts = dict(zip(("train", "val"), corpus.split(validation_fraction), strict=True))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tokens-") as scratch:
        written = Path(scratch) / folder.name
        written.mkdir()
        digest = hashlib.sha256()
        counts = {part: _write_part(written, part, paths, tokenizer, digest) for part, paths in parts.items()}
        facts = TokenFiles(folder, tokenizer.dtype.name, **counts, digest=digest.hexdigest())
        manifest = {name: value for name, value in asdict(facts).items() if name != "folder"}
        (written / _MANIFEST).write_text(json.dumps(manifest | {"root": str(corpus.root)}, indent=1))
        try:
            written.rename(folder)
        except OSError:
            if not folder.is_dir():  # not merely another process that was first
                raise


def read_manifest(folder: Path) -> TokenFiles:
    """What a folder of tokens holds.

    Raises:
        CorpusError: there is no such folder, or a file is not as long as the manifest says.
    """
    if not (folder / _MANIFEST).is_file():
        raise CorpusError(
            f"{folder} holds no tokens, which one process of each node writes in prepare_data: it failed, or the text "
            "was changed since. Look at the log of this node's first process."
        )
    manifest = json.loads((folder / _MANIFEST).read_text())
    files = TokenFiles(folder, **{name: manifest[name] for name in ("dtype", "train", "val", "digest")})
    for part in ("train", "val"):
        expected = getattr(files, part) * np.dtype(files.dtype).itemsize
        found = files.path(part).stat().st_size
        if found != expected:
            raise CorpusError(
                f"{files.path(part)} has {found} bytes, but its manifest says {expected}: it was changed after it was "
                f"written. Remove the folder, and the next run writes it again: rm -r {folder}"
            )
    return files


def map_tokens(path: Path, dtype: str) -> Tokens:
    """The tokens of a file, mapped: only what is read of them is in memory, once for all processes of a machine."""
    return np.memmap(path, dtype=dtype, mode="r")


def _write_part(folder: Path, part: str, documents: Iterable[Path], tokenizer: Tokenizer, digest: hashlib._Hash) -> int:
    count = 0
    with (folder / f"{part}.bin").open("wb") as file:
        for document in documents:
            tokens = tokenizer.encode(document)
            tokens.tofile(file)
            digest.update(tokens.tobytes())
            count += len(tokens)
    return count


class Tokenizer(ABC):
    """Makes numbers from 0 to `vocab_size - 1` of a document.

    Attributes:
        vocab_size: how many tokens there are.
        identity: a hash, another one for a tokenizer that gives other tokens.
    """

    vocab_size: int
    identity: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer that holds every token."""
        return np.min_scalar_type(self.vocab_size - 1)

    @abstractmethod
    def encode(self, document: Path) -> Tokens:
        """The tokens of a file, with what separates documents at the end, in `dtype`."""


class ByteTokenizer(Tokenizer):
    """Every byte is a token, whatever the encoding; byte 0 follows each document."""

    vocab_size = 256
    identity = "bytes"

    @override
    def encode(self, document: Path) -> Tokens:
        return np.append(np.fromfile(document, dtype=np.uint8), np.uint8(_NUL))


class FileTokenizer(Tokenizer):
    """A tokenizer in one JSON file, as the `tokenizers` library saves it: `tokenizer.json` beside many models.

    Args:
        path: the file.
        end_of_text: the token that follows each document, as `<|endoftext|>`; None for none.

    Raises:
        CorpusError: no such file or token, or the library is missing.
    """

    def __init__(self, path: Path, end_of_text: str | None) -> None:
        self._tokenizer = _load(path)
        self.identity = hashlib.sha256(path.read_bytes() + f"\0{end_of_text}".encode()).hexdigest()
        # the numbers of added tokens may leave gaps, so that counting them is not enough
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._end: list[int] = []
        if end_of_text is not None:
            number = self._tokenizer.token_to_id(end_of_text)
            if number is None:
                raise CorpusError(f"The tokenizer {path} has no token {end_of_text!r}. Set data.end_of_text to one.")
            self._end = [number]

    @override
    def encode(self, document: Path) -> Tokens:
        content = document.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{document} is not UTF-8: byte {content[error.start]:#04x} at {error.start}. A tokenizer reads text: "
                "convert the file, leave it out by data.pattern, or read bytes: data.tokenizer=null."
            ) from error
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids + self._end, dtype=self.dtype)


def _load(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise CorpusError(
            f"The tokenizer {path} needs the `tokenizers` library, which is not installed. Type `pip install "
            "tokenizers`, or read bytes: data.tokenizer=null."
        ) from error
    if not path.is_file():
        raise CorpusError(f"There is no tokenizer file {path}. Give the path of a tokenizer.json: data.tokenizer=...")
    return tokenizers.Tokenizer.from_file(str(path))


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
