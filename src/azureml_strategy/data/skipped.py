"""Counts what a filter of a data set passes over, for one warning with names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_SHOWN = 3
# Files and folders that are no data, by the beginnings of lower-case names: documents, and what desktops leave behind.
_NO_DATA = (".", "readme", "license", "licence", "thumbs.db", "desktop.ini", "__macosx", "_success")


@dataclass
class PassedOver:
    """What a filter passes over."""

    count: int = 0
    names: list[str] = field(default_factory=list)  # the first ones: nobody reads millions of names

    def add(self, name: str) -> None:
        """Count one."""
        self.count += 1
        if self.count <= _SHOWN + 1:
            self.names.append(name)

    def extend(self, others: Iterable[PassedOver]) -> None:
        """Count those of others as well."""
        for other in others:
            self.count += other.count
            self.names = [*self.names, *other.names][: _SHOWN + 1]

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        return first_names(self.names)


def first_names(names: Sequence[str]) -> str:
    """Return the first names as a text, and that there are more."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def is_no_data(name: str) -> bool:
    """Whether a file or folder of this name is no data anywhere: hidden, a README, or what a desktop leaves behind."""
    return name.lower().startswith(_NO_DATA)


def warn(text: str) -> None:
    """Warn on one rank."""
    from lightning.pytorch.utilities import rank_zero_warn  # slow to import, and seldom needed

    rank_zero_warn(text, stacklevel=5)  # the caller's line
