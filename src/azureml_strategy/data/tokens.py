"""Finds text files, and writes and reads them as files of tokens, by a tokenizer or byte by byte."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from azureml_strategy.data.folders import file_digest, resolve_place, written_once
from azureml_strategy.data.skipped import PassedOver, is_no_data, warn
from azureml_strategy.files import read_whole

_MANIFEST = "manifest.json"
# Version of the layout below. Another version gets another folder.
_VERSION = 1

Tokens = NDArray[np.unsignedinteger[Any]]
# Separates documents that are read as bytes: text does not contain it.
_NUL = 0
# Folders below the standard library's that are not part of it, or that hold deliberately malformed texts.
_NOT_STANDARD = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_SPLIT_SEED = 0


@dataclass(frozen=True)
class TokenFiles:
    """A folder with `train.bin`, `val.bin` and a manifest, from which these fields are read.

    `digest` is a hash of all tokens, which is equal if two nodes read the same text with the same tokenizer.
    """

    folder: Path
    dtype: str  # of the tokens, numpy's name
    train: int  # tokens for training
    val: int  # tokens for validation
    digest: str

    def path(self, part: str) -> Path:
        """Return the file of `train` or `val`."""
        return self.folder / f"{part}.bin"

    def count(self, part: str) -> int:
        """Return the number of tokens for `train` or `val`."""
        return {"train": self.train, "val": self.val}[part]


def token_folder(cache: Path, corpus: Corpus, tokenizer: Tokenizer, validation_fraction: float) -> Path:
    """Return the folder for these documents, this tokenizer and this split. It changes if any of them does."""
    facts = (_VERSION, corpus.identity(), tokenizer.identity, validation_fraction)
    return cache / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def write_tokens(folder: Path, corpus: Corpus, tokenizer: Tokenizer, validation_fraction: float) -> None:
    """Write the token files, all or nothing, as `written_once` does.

    Raises:
        CorpusError: a document cannot be read, or none is left for training.
    """
    if folder.is_dir():
        return
    parts = dict(zip(("train", "val"), corpus.split(validation_fraction), strict=True))
    with written_once(folder, ".tokens-") as written:
        if written is None:
            return
        written.mkdir()
        digest = hashlib.sha256()
        counts = dict.fromkeys(parts, 0)
        for part, documents in parts.items():
            with (written / f"{part}.bin").open("wb") as file:
                for document in documents:
                    tokens = tokenizer.encode(document)
                    tokens.tofile(file)
                    digest.update(tokens.tobytes())
                    counts[part] += len(tokens)
        facts = TokenFiles(folder, tokenizer.dtype.name, **counts, digest=digest.hexdigest())
        manifest = {name: value for name, value in asdict(facts).items() if name != "folder"}
        (written / _MANIFEST).write_text(json.dumps(manifest | {"root": str(corpus.root)}, indent=1))


def read_manifest(folder: Path) -> TokenFiles:
    """Read what a folder of tokens holds.

    Raises:
        CorpusError: the folder does not exist, or a file is not as long as its manifest says.
    """
    if not (folder / _MANIFEST).is_file():
        raise CorpusError(
            f"{folder} holds no tokens, which one process of each node writes in prepare_data: it failed, or the text "
            "was changed since. Look at the log of this node's first process."
        )
    manifest = json.loads((folder / _MANIFEST).read_text())
    files = TokenFiles(folder, **{name: manifest[name] for name in ("dtype", "train", "val", "digest")})
    for part in ("train", "val"):
        expected = files.count(part) * np.dtype(files.dtype).itemsize
        found = files.path(part).stat().st_size
        if found != expected:
            raise CorpusError(
                f"{files.path(part)} has {found} bytes, but its manifest says {expected}: it was changed after it was "
                f"written. Remove the folder, and the next run writes it again: rm -r {folder}"
            )
    return files


def map_tokens(path: Path, dtype: str) -> Tokens:
    """Map the tokens of a file: only what is read is in memory, once for all processes of a machine."""
    return np.memmap(path, dtype=dtype, mode="r")


class Tokenizer(ABC):
    """Converts a document to numbers from 0 to `vocab_size - 1`.

    Attributes:
        vocab_size: number of different tokens.
        identity: a hash, which differs for tokenizers that give different tokens.
    """

    vocab_size: int
    identity: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer that holds every token."""
        return np.min_scalar_type(self.vocab_size - 1)

    @abstractmethod
    def encode(self, document: Path) -> Tokens:
        """Return the tokens of a file in `dtype`, with the separator of documents at the end."""


class ByteTokenizer(Tokenizer):
    """Makes every byte a token, whatever the encoding. Byte 0 follows each document."""

    vocab_size = 256
    identity = "bytes"

    @override
    def encode(self, document: Path) -> Tokens:
        return np.append(np.frombuffer(read_whole(document), dtype=np.uint8), np.uint8(_NUL))


class FileTokenizer(Tokenizer):
    """A tokenizer in one JSON file, as the `tokenizers` library saves it: the `tokenizer.json` of many models.

    Args:
        path: the file.
        end_of_text: the token that follows each document, such as `<|endoftext|>`; None for none.

    Raises:
        CorpusError: the file or the token does not exist, or the library is missing.
    """

    def __init__(self, path: Path, end_of_text: str | None) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise CorpusError(
                f"The tokenizer {path} needs the `tokenizers` library, which is not installed. Type `pip install "
                "tokenizers`, or read bytes: data.tokenizer=null."
            ) from error
        if not path.is_file():
            raise CorpusError(
                f"There is no tokenizer file {path}. Give the path of a tokenizer.json: data.tokenizer=..."
            )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        facts = path.read_bytes() + f"\0{end_of_text}".encode()
        if self._tokenizer.truncation or self._tokenizer.padding:
            # They were saved for samples of one length, and a document is read whole. Earlier versions cut it: so the
            # identity has to be another one.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            facts += b"\0whole"
        self.identity = hashlib.sha256(facts).hexdigest()
        # Not the number of tokens: those of added ones may leave gaps.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._end: list[int] = []
        if end_of_text is not None:
            number = self._tokenizer.token_to_id(end_of_text)
            if number is None:
                raise CorpusError(f"The tokenizer {path} has no token {end_of_text!r}. Set data.end_of_text to one.")
            self._end = [number]

    @override
    def encode(self, document: Path) -> Tokens:
        content = read_whole(document)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{document} is not UTF-8: byte {content[error.start]:#04x} at {error.start}. A tokenizer reads text: "
                "convert the file, leave it out by data.pattern, or read bytes: data.tokenizer=null."
            ) from error
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids + self._end, dtype=self.dtype)


def make_tokenizer(name: str | os.PathLike[str] | None, end_of_text: str | None) -> Tokenizer:
    """Make a tokenizer from a `tokenizer.json`, or the folder or hub id of a model that has one; of bytes from None.

    `end_of_text` is the token that follows each document; None for none. Bytes have their own.

    Raises:
        CorpusError: the file or the token does not exist, or the library is missing.
    """
    if name is None:
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.suffix != ".json":
        from azureml_strategy.huggingface.sources import find_source  # imports Lightning, which bytes do not need

        path = find_source(name).folder / "tokenizer.json"
    return FileTokenizer(path, end_of_text)


class CorpusError(ValueError):
    """The text to train on is missing, too short or unreadable. The message says which."""


@dataclass(frozen=True)
class Corpus:
    """Documents, one per file, sorted by name.

    Attributes:
        root: the folder below which they lie, or the only file.
        documents: their paths; none of them is empty.
        others: files that do not match the pattern. A pattern of several parts, `en/*.txt`, gives none: its user has
            chosen among folders.
        empty: files that match, and have no bytes.
    """

    root: Path
    documents: tuple[Path, ...]
    others: PassedOver = field(default_factory=PassedOver, compare=False)
    empty: PassedOver = field(default_factory=PassedOver, compare=False)

    def warn_of_others(self, pattern: str) -> None:
        """Warn of the files that are passed over. One process of each node calls this, before it writes tokens."""
        if self.others:
            warn(
                f"{self.root}: {len(self.documents):,} files are read, and {self.others.count:,} others are passed "
                f"over, as they do not match data.pattern={pattern!r}: {self.others}. Rename or convert what is to be "
                "read, or set another data.pattern; capital letters count."
            )
        if self.empty:
            warn(f"{self.root}: {self.empty.count:,} empty files are passed over: {self.empty}.")

    def identity(self) -> str:
        """Hash names, sizes and modification times. The hash differs if a document was changed, added or removed."""
        return file_digest(self.root, [path.relative_to(self.root) for path in self.documents])

    def split(self, validation_fraction: float) -> tuple[Sequence[Path], Sequence[Path]]:
        """Return whole documents for training and for validation, the same ones at every call.

        Of a fraction above 0, at least one document is for validation.

        Raises:
            CorpusError: no document is left for training.
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
    """Find the user's documents in a folder or one file. Without both, take the source of Python's standard library.

    The pattern, such as `*.txt`, tells which files below the folder are documents; hidden ones never are.

    Raises:
        CorpusError: there are no files, or only empty ones.
        DataFolderError: the job has no such input.
    """
    if root is None and input_name is None:
        folder = Path(sysconfig.get_path("stdlib"))
        return _corpus(folder, _standard_library(folder), "*.py")
    folder = Path(resolve_place(root, input_name, environ)).expanduser()
    if folder.is_file():
        return _corpus(folder, [folder], folder.name)
    if not folder.is_dir():
        raise CorpusError(f"There is no folder or file {folder}. Give the text as data.root=... or data.input_name=...")
    if len(Path(pattern).parts) > 1:
        return _corpus(folder, folder.rglob(pattern), pattern)
    others = PassedOver()
    return _corpus(folder, _matching(folder, pattern, others), pattern, others)


def _matching(folder: Path, pattern: str, others: PassedOver) -> Iterator[Path]:
    """Yield the files below a folder that match, as `rglob` does, and add the others to `others`."""

    def keep_closed(error: OSError) -> None:
        if not isinstance(error, PermissionError):
            raise error
        others.add(f"{os.path.relpath(error.filename, folder)}/ ({error.strerror})")

    for place, folders, files in os.walk(folder, onerror=keep_closed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if os.path.islink(os.path.join(place, name)):  # `os.walk` does not enter it: it may lead in a circle
                others.add(f"{Path(place, name).relative_to(folder)}/ (a link)")
        for name in sorted(files):
            path = Path(place, name)
            if fnmatchcase(name, pattern):
                yield path
            elif not is_no_data(name):
                others.add(str(path.relative_to(folder)))


def _standard_library(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        # Do not enter them at all: site-packages may hold a hundred times as many files.
        folders[:] = (name for name in folders if name not in _NOT_STANDARD)
        yield from (Path(place, name) for name in files if name.endswith(".py"))


def _corpus(root: Path, found: Iterable[Path], pattern: str, others: PassedOver | None = None) -> Corpus:
    def is_hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(root).parts)

    files = [path for path in found if path.is_file() and not is_hidden(path)]
    documents, empty = [], PassedOver()
    for path in sorted(files):
        if path.stat().st_size:
            documents.append(path)
        else:
            empty.add(str(path.relative_to(root)))
    if not documents:
        seen = f"{len(files)} file(s) that match {pattern!r}, all of them empty" if files else f"no file {pattern!r}"
        raise CorpusError(f"{root} has {seen}. Give another folder, data.root=..., or data.pattern='*.md', say.")
    return Corpus(root, tuple(documents), others or PassedOver(), empty)
