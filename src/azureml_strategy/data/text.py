"""Sequences of tokens to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from azureml_strategy.data.images import IGNORED_LABEL
from azureml_strategy.data.token_files import map_tokens


class TokenSequences(Dataset[tuple[Tensor, Tensor]]):
    """All sequences of a file of tokens, side by side; a tail that fills no sequence is left out.

    A sample is `(inputs, targets)`, int64 `(length,)` each: the target of a token is the one after it. The index
    `len(self)` gives a sample whose targets are all -100, which makes the shares of the ranks equal.

    Args:
        path: the file, which is mapped and not read.
        dtype: of its tokens, as numpy names it.
        length: tokens of a sequence.
    """

    def __init__(self, path: Path, dtype: str, length: int) -> None:
        self._arguments = (path, dtype, length)
        self._length = length
        self._tokens = map_tokens(path, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        # a worker process that is not forked maps the file itself; numpy would send it the whole content
        return (TokenSequences, self._arguments)

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == len(self):
            return torch.zeros(self._length, dtype=torch.int64), torch.full((self._length,), IGNORED_LABEL)
        start = index * self._length
        tokens = torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))
        return tokens[:-1], tokens[1:]


def count_tokens(batch: tuple[Tensor, Tensor]) -> int:
    """The tokens of a batch: what `ThroughputCallback(batch_size=..., unit="tokens")` counts."""
    return batch[0].numel()
