"""Reads numpy's files: without pickles, and without memory for more than the file holds, whatever its header claims."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
import numpy.typing as npt

NPY = b"\x93NUMPY"
"""The first bytes of an .npy file."""


def read_npy(content: bytes | bytearray) -> npt.NDArray[Any]:
    """Read an array from the bytes of an .npy file. The array lies in these bytes.

    Raises:
        ValueError: the header is damaged, or the file is not as long as it says; the message continues "the file".
    """
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(stream)
    except Exception as error:  # numpy parses it as Python, which may raise anything
        raise ValueError("has a damaged header") from error
    if dtype.hasobject:
        raise ValueError("holds object, and no numbers")
    if (
        not dtype.itemsize
        or min(shape, default=0) < 0
        or math.prod(shape) * dtype.itemsize != len(content) - stream.tell()
    ):
        raise ValueError("is longer or shorter than its header says")
    try:
        flat = np.frombuffer(content, dtype, offset=stream.tell()) if math.prod(shape) else np.empty(0, dtype)
        return flat.reshape(shape, order="F" if fortran else "C")
    except ValueError as error:
        raise ValueError(f"has a shape that numpy does not take, {error}") from error


def read_npz(source: Path | bytes, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """Read arrays by name of an .npz file, or its content, that `numpy.savez` has written, which compresses nothing.

    Raises:
        ValueError: the file is damaged or lacks an array; the message continues "the file".
        OSError: it cannot be read.
    """
    try:
        with ZipFile(source if isinstance(source, Path) else io.BytesIO(source)) as file:
            return {name: read_npy(_member(file, f"{name}.npy")) for name in names}
    except (BadZipFile, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"is no whole .npz file: {' '.join(str(error).split())}") from error


def _member(file: ZipFile, name: str) -> bytearray:
    member = file.getinfo(name)
    if member.compress_type != ZIP_STORED or member.file_size != member.compress_size:
        raise ValueError(f"has a compressed {name}, whose size cannot be told before it is read")
    content = bytearray()
    with file.open(member) as stream:  # grows with what comes: the size in the directory may be any number
        while piece := stream.read(1 << 24):
            content += piece
    return content
