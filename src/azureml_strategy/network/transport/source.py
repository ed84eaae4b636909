"""A log of any kind and size as lines, a bounded piece of it in memory at a time."""

from __future__ import annotations

import os
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from typing import Protocol, Union, runtime_checkable

PIECE = 1 << 17  # characters or bytes read at once: what stays in a core's cache
# NCCL formats a message into 1 KiB, its list of devices into 2 KiB; launchers put a prefix before it.
MAX_LINE = 1 << 14


@runtime_checkable
class Stream(Protocol):
    """An open file, text or binary."""

    def read(self, size: int, /) -> str | bytes:
        """At most `size` characters or bytes, none at the end."""


Log = Union[str, bytes, "os.PathLike[str]", Stream, Iterable[str]]


def read_lines(log: Log) -> Iterator[list[str]]:
    """The lines of a log, in lists of those that a piece of it completes.

    A carriage return ends a line too: progress bars write gigabytes between two line feeds. What of a line lies
    beyond `MAX_LINE` may be missing. Bytes that are no UTF-8 are replaced.

    Raises:
        OSError: the file cannot be read.
    """
    carry = ""
    for piece in _pieces(log):
        *lines, carry = (carry + piece).replace("\r", "\n").split("\n")
        carry = carry[:MAX_LINE]
        yield lines
    yield [carry]


def _pieces(log: Log) -> Iterator[str]:
    if isinstance(log, bytes):
        return _decoded(log[start : start + PIECE] for start in range(0, len(log), PIECE))
    if isinstance(log, str):
        return (log[start : start + PIECE] for start in range(0, len(log), PIECE))
    if isinstance(log, os.PathLike):
        return _file(log)
    if isinstance(log, Stream):
        return _decoded(_stream(log))
    return (f"{line}\n" for line in log)


def _file(path: os.PathLike[str]) -> Iterator[str]:
    with open(path, "rb") as file:
        yield from _decoded(_stream(file))


def _stream(stream: Stream) -> Iterator[str | bytes]:
    while piece := stream.read(PIECE):
        yield piece


def _decoded(pieces: Iterable[str | bytes]) -> Iterator[str]:
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    for piece in pieces:
        yield piece if isinstance(piece, str) else decoder.decode(piece)
