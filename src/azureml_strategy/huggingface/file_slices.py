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
from azureml_strategy.whole_reads import read_range

Index = slice | EllipsisType


class FileSlice:
    """A tensor of a file, with the methods of safetensors' own slices that transformers calls.

    Args:
        file: descriptor of the open file.
        path: of the file, for messages.
        offset: where the tensor begins in it, in bytes.
        dtype: safetensors' name of its type, such as `BF16`.
        shape: its shape.
    """

    def __init__(self, file: int, path: Path, offset: int, dtype: str, shape: list[int]) -> None:
        self._file, self._path, self._offset, self._dtype, self._shape = file, path, offset, dtype, shape

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self._shape

    def get_dtype(self) -> str:
        """Return safetensors' name of its type."""
        return self._dtype

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Read a part. It reads whole rows of the file, and only those that the part has."""
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
        size, place = (stop - start) * row, self._offset + start * row
        self._require(place + size - os.fstat(self._file).st_size, size, place)  # before memory is taken for it
        content = torch.empty(size, dtype=torch.uint8)
        view, done = content.numpy().data, 0
        while done < len(view):
            got = os.preadv(self._file, [view[done:]], place + done)
            if not got:  # it was cut off since
                self._require(len(view) - done, size, place)
            done += got
        return content.view(dtype)

    def _require(self, missing: int, size: int, place: int) -> None:
        if missing > 0:
            raise OSError(
                f"The file ends {missing} bytes before its tensor does: {self._path}, of which {size:,} bytes from "
                f"byte {place:,} on were asked for. Copy it again."
            )


@contextmanager
def open_slices(files: list[Path]) -> Iterator[dict[str, FileSlice]]:
    """Open safetensors files, and return their tensors by name; they can be read until the context ends.

    The format is a length of 8 bytes, that many bytes of JSON, and the tensors
    (https://huggingface.co/docs/safetensors/index#format).
    """
    opened = [os.open(file, os.O_RDONLY) for file in files]
    try:
        yield {name: each for file, path in zip(opened, files, strict=True) for name, each in _tensors(file, path)}
    finally:
        for file in opened:
            os.close(file)


def _tensors(file: int, path: Path) -> Iterator[tuple[str, FileSlice]]:
    length = int.from_bytes(read_range(file, 8, 0), "little")
    text = read_range(file, min(length, os.fstat(file).st_size), 8)
    if len(text) < length:
        raise OSError(f"{path} ends within its header, which has {length:,} bytes from byte 8 on. Copy it again.")
    try:
        header: dict[str, Any] = json.loads(text)
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            start, stop = facts["data_offsets"]
            if not all(type(each) is int and each >= 0 for each in (start, stop, *facts["shape"])):
                raise ValueError("places and sizes are whole numbers from 0")
            if math.prod(facts["shape"]) * torch_type(facts["dtype"]).itemsize != stop - start:
                raise ValueError(f"a tensor {facts['shape']} does not take the bytes from {start} to {stop}")
            yield name, FileSlice(file, path, 8 + length + start, facts["dtype"], facts["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OSError(f"{path} has a damaged header: {error!r:.200}. Copy it again.") from error
