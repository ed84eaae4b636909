"""Files that others may have chosen: a name from a file stays in its folder, a folder is our own, a read goes to the
last byte that was asked for, and a file is written as a whole or not at all.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from contextlib import suppress
from pathlib import Path

# NAME_MAX and PATH_MAX of Linux, bytes.
_LONGEST_NAME, _LONGEST_PATH = 255, 4096
# Control characters, surrogates, and ends of lines and of paragraphs.
_NOT_OF_A_LINE = ("Cc", "Cs", "Zl", "Zp")


class OutsideError(ValueError):
    """A name leads out of its folder, or a folder belongs to somebody else. The message says which and what to do."""


def is_component(name: str) -> bool:
    """Whether a name is that of a file in a folder, and of none elsewhere.

    Names of one line hold no NUL, newline or surrogate.
    """
    return name not in ("", ".", "..") and "/" not in name and is_one_line(name)


def is_one_line(text: str) -> bool:
    """Whether a text has no control characters, ends of lines and surrogates.

    Unlike `str.isprintable`, this takes the spaces of other scripts, and what joins their letters.
    """
    return text.isprintable() or not any(unicodedata.category(each) in _NOT_OF_A_LINE for each in text)


def name_within(folder: Path, name: object) -> Path:
    """Join a name that a file gives, a relative path with `/`, with the folder that the file is about.

    Raises:
        OutsideError: the name is absolute, goes upwards, is too long, or no printable text.
    """
    if not isinstance(name, str) or not all(map(is_component, name.split("/"))):
        raise OutsideError(f"{name!r:.100} is no path of a file inside of {folder}")
    parts = [len(os.fsencode(each)) for each in name.split("/")]
    if max(parts) > _LONGEST_NAME or sum(parts) + len(parts) > _LONGEST_PATH:
        raise OutsideError(f"{name[:40]!r}..., of {len(name):,} characters, is too long for a path in {folder}")
    return folder / name


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user can write to, where others may have made it before, and return it.

    Raises:
        OutsideError: there is a link or a file in its place, or others may write to it.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise OutsideError(f"{folder} is not a folder that belongs to this user alone. Remove it, or name another one.")
    return folder


def is_private(folder: Path) -> bool:
    """Whether this is a folder, and no link to one, that belongs to this user, and that nobody else can write to."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def filesystem_of(folder: Path, table: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the type of a folder's file system, such as `ext4` or `fuse`; None if that is not known."""
    path = os.path.realpath(folder)
    try:
        mounts = [line.split(" ")[1:3] for line in table.read_text().splitlines()]
    except OSError:
        return None
    above = [(point, kind) for point, kind in mounts if os.path.commonpath((path, point)) == point]
    return max(reversed(above), key=lambda mount: len(mount[0]), default=("", None))[1]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is either complete or absent; create its folder if needed.

    Other processes of this machine may write it at the same time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


class ShortReadError(OSError):
    """A file gave fewer bytes than it has."""

    def __init__(self, got: int, wanted: int, offset: int, size: int) -> None:
        text = f"{got:,} of {wanted:,} bytes came from byte {offset:,} on, of a file of {size:,} bytes"
        super().__init__(errno.EIO, text)


def read_range(file: int, length: int, offset: int) -> bytes:
    """Read some bytes of an open file from a byte on, in as many reads as it takes; fewer only where the file ends.

    The position of the file stays as it is.

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
