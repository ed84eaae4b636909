"""Reading the small text files of /sys and /proc, where any entry may be missing or refuse to be read."""

from __future__ import annotations

from pathlib import Path

_MOST_BYTES = 64 * 1024  # an attribute of sysfs holds at most a page


def read_text(path: Path) -> str | None:
    """The content without surrounding blanks; None where it cannot be read: a diagnostic must not stop training."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None


def read_number(path: Path, base: int = 10) -> int | None:
    """The whole number in a file; None where there is none."""
    text = read_text(path)
    try:
        return int(text, base) if text else None
    except ValueError:
        return None


def entries(folder: Path) -> list[Path]:
    """What a folder holds, by name; nothing where it cannot be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
