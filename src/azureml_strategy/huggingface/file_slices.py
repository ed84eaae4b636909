"""Reads parts of the tensors of a safetensors file, and no more of the file than that.

safetensors itself maps a file into memory, whose pages then count as memory of the process; or it reads a whole tensor
for each part of it, so that a node whose ranks each want a shard would read the model once for each rank.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from azureml_strategy.huggingface.transformers_internals import torch_type

Index = slice | EllipsisType


class FileSlice:
    """A tensor of a file, with the methods of safetensors' own slices that transformers calls.

    Args:
        file: descriptor of the open file.
        offset: where the tensor begins in it, in bytes.
        dtype: safetensors' name of its type, such as `BF16`.
        shape: its shape.
    """

    def __init__(self, file: int, offset: int, dtype: str, shape: list[int]) -> None:
        self._file, self._offset, self._dtype, self._shape = file, offset, dtype, shape

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self._shape

    def get_dtype(self) -> str:
        """Return safetensors' name of its type."""
        return self._dtype

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Read a part. Of the file it reads the rows that the part has, each of them whole."""
        indices = index if isinstance(index, tuple) else (index,)
        if not self._shape:
            return self._read(0, 1).view(())
        rows = slice(None) if indices[0] is Ellipsis else indices[0]
        start, stop, _ = rows.indices(self._shape[0])
        part = self._read(start, max(stop, start)).view(-1, *self._shape[1:])
        inner = tuple(each for each in indices[1:] if each is not Ellipsis)
        return part[(slice(None), *inner)].contiguous() if inner else part

    def _read(self, start: int, stop: int) -> Tensor:
        dtype = torch_type(self._dtype)
        row = math.prod(self._shape[1:]) * dtype.itemsize
        content = torch.empty((stop - start) * row, dtype=torch.uint8)
        view, done = content.numpy().data, 0
        while done < len(view):
            got = os.preadv(self._file, [view[done:]], self._offset + start * row + done)
            if not got:
                raise OSError(f"The file ends {len(view) - done} bytes before its tensor does. Copy it again.")
            done += got
        return content.view(dtype)


@contextmanager
def open_slices(files: list[Path]) -> Iterator[dict[str, FileSlice]]:
    """Open safetensors files, and return their tensors by name; they can be read until the context ends.

    The format is a length of 8 bytes, that many bytes of JSON, and the tensors
    (https://huggingface.co/docs/safetensors/index#format).
    """
    opened = [os.open(file, os.O_RDONLY) for file in files]
    try:
        yield {name: each for file in opened for name, each in _tensors(file)}
    finally:
        for file in opened:
            os.close(file)


def _tensors(file: int) -> Iterator[tuple[str, FileSlice]]:
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    header: dict[str, Any] = json.loads(os.pread(file, length, 8))
    for name, facts in header.items():
        if name != "__metadata__":
            yield name, FileSlice(file, 8 + length + facts["data_offsets"][0], facts["dtype"], facts["shape"])
