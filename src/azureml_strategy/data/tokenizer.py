"""From documents to tokens: bytes as they are, or a tokenizer of the user's."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from azureml_strategy.data.corpus import CorpusError

Tokens = NDArray[np.unsignedinteger[Any]]
# Between documents read as bytes: no text has this one.
_NUL = 0


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
