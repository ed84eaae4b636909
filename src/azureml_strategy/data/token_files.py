"""Tokens on disk, written once and mapped into memory."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from azureml_strategy.data.corpus import Corpus, CorpusError
from azureml_strategy.data.tokenizer import Tokenizer, Tokens

_MANIFEST = "manifest.json"
# Of the layout below: another one is another folder.
_VERSION = 1


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
