"""Reads files to the last byte that was asked for: a mount may return fewer bytes at once than a read call asks for.

Only the length of what it returns says so. Bytes that are silently left out would become another image, or a shorter
text.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


class ShortReadError(OSError):
    """A file gave fewer bytes than it has."""

    def __init__(self, got: int, wanted: int, offset: int, size: int) -> None:
        text = f"{got:,} of {wanted:,} bytes came from byte {offset:,} on, of a file of {size:,} bytes"
        super().__init__(errno.EIO, text)


def read_range(file: int, length: int, offset: int) -> bytes:
    """Read a part of a file in as many reads as it takes. The position of the file stays as it is.

    Args:
        file: descriptor of the open file.
        length: bytes of the part.
        offset: where it begins, bytes.

    Returns:
        `length` bytes; fewer only where the file ends within the part.

    Raises:
        ShortReadError: the file does not end there, and gives no more.
        OSError: it cannot be read.
    """
    content = os.pread(file, length, offset)
    if len(content) == length:
        return content
    pieces, got = [content], len(content)
    while content and got < length:
        content = os.pread(file, length - got, offset + got)
        pieces.append(content)
        got += len(content)
    size = os.fstat(file).st_size
    if got < length and offset + got < size:
        raise ShortReadError(got, length, offset, size)
    return b"".join(pieces)


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """Read a file to its end.

    Raises:
        ShortReadError: it gives fewer bytes than it has.
        OSError: it cannot be read.
    """
    with Path(path).open("rb", buffering=0) as file:
        return read_range(file.fileno(), os.fstat(file.fileno()).st_size, 0)
