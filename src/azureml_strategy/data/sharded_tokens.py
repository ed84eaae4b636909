"""Sequences of tokens out of a packed text: from a folder, a mount or Blob Storage, the same ones as from the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from azureml_strategy.data.images import IGNORED_LABEL
from azureml_strategy.data.shard_index import ShardIndexError
from azureml_strategy.data.tokens import CorpusError

if TYPE_CHECKING:
    from azureml_strategy.data.readers import ShardReader


class ShardedTokens(Dataset[tuple[Tensor, Tensor]]):
    """All sequences of a packed text, side by side: the samples of `TokenSequences`, by the same numbers.

    A sample is `(inputs, targets)`, int64 `(length,)` each: the target of a token is the next token. The index
    `len(self)` gives a sample whose targets are all -100, which samplers use to make the shares of the ranks equal.

    Args:
        reader: of the packed set.
        length: tokens per sequence.

    Raises:
        ShardIndexError: the set holds something else than tokens, or not all of them.
    """

    def __init__(self, reader: ShardReader, length: int) -> None:
        index = reader.index
        if index.kind != "tokens":
            raise ShardIndexError(f"This set holds {index.kind}, not tokens. Pack text: data pack SRC OUT --text")
        self.reader = reader
        self._length = length
        self._dtype = np.dtype(index.facts["dtype"])
        self._tokens = int(index.facts["tokens"])
        self._run = int(index.facts["run"])
        if len(index) != -(-self._tokens // self._run):
            raise ShardIndexError(
                f"The index has {len(index)} runs of {self._run} tokens, and there are {self._tokens} tokens: some are "
                "missing. Pack the text anew."
            )
        self._ends = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return (self._tokens - 1) // self._length

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the sequences of a batch. A record that several of them need is read once.

        Raises:
            OSError: a record is damaged or cannot be had. No other text can stand in for it.
        """
        needed = sorted({number for index in indices if index < len(self) for number in self._records(index)})
        records = {}
        for number, content in zip(needed, self.reader.read(needed), strict=True):
            if isinstance(content, Exception):
                raise content
            # numpy's format 1.0: ten bytes, whose last two are the length of a header, then the header and the tokens
            records[number] = np.frombuffer(content, self._dtype, offset=10 + int.from_bytes(content[8:10], "little"))
        return [self._sequence(index, records) for index in indices]

    def expect(self, sequences: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        """Tell the reader which sequences will be read: in this pass through the data, and in the next one."""
        numbers, self._ends = self._expand(sequences)
        self.reader.expect(numbers, self._expand(following)[0])

    def reached(self, position: int) -> None:
        """Tell the reader how many sequences of the pass have been handed out."""
        known = min(position, len(self._ends))  # padding, at the end of a pass, is not read
        self.reader.reached(int(self._ends[known - 1]) if known else 0)

    def _records(self, index: int) -> range:
        start = index * self._length
        return range(start // self._run, (start + self._length) // self._run + 1)

    def _expand(self, sequences: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The records of sequences, one after the other, and how many there are up to the end of each sequence."""
        starts = sequences[sequences < len(self)] * self._length
        first, last = starts // self._run, (starts + self._length) // self._run
        counts = last - first + 1
        ends = np.cumsum(counts)
        within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        return np.repeat(first, counts) + within, ends

    def _sequence(self, index: int, records: Mapping[int, NDArray[Any]]) -> tuple[Tensor, Tensor]:
        if index == len(self):
            return torch.zeros(self._length, dtype=torch.int64), torch.full((self._length,), IGNORED_LABEL)
        numbers = self._records(index)
        start = index * self._length - numbers[0] * self._run
        joined = np.concatenate([records[number] for number in numbers]) if len(numbers) > 1 else records[numbers[0]]
        tokens = torch.from_numpy(joined[start : start + self._length + 1].astype(np.int64))
        return tokens[:-1], tokens[1:]


@dataclass(frozen=True)
class PackedText:
    """A packed text: what `TokenFiles` is for one that was converted on this node.

    Attributes:
        readers: of the sets `train` and, if there is validation, `val`.
    """

    readers: Mapping[str, ShardReader]

    def count(self, part: str) -> int:
        """Return the number of tokens for `train` or `val`."""
        return int(self.readers[part].index.facts["tokens"]) if part in self.readers else 0

    @property
    def digest(self) -> str:
        """Hash of everything, equal on nodes that read the same set."""
        return "-".join(reader.index.digest for reader in self.readers.values())

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        return int(self.readers["train"].index.facts["vocab_size"])

    def check_tokenizer(self, identity: str) -> None:
        """Refuse another tokenizer than that of the packed text.

        Raises:
            CorpusError: it is another one.
        """
        packed = self.readers["train"].index.facts["tokenizer"]
        if packed != identity:
            raise CorpusError(
                f"The text was packed with another tokenizer: its hash is {packed[:12]}, and that of data.tokenizer "
                f"(with data.end_of_text) is {identity[:12]}. Leave data.tokenizer out, or pack the text with this one."
            )
