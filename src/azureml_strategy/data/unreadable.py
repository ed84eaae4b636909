"""Counting of the images of a data set that cannot be read."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

_NAMED = 5


class UnreadableImagesError(RuntimeError):
    """More images are unreadable than allowed, or all of them are."""


class UnreadableImages:
    """Tracks which images of a data set could not be read.

    The marks lie in shared memory, so the worker processes of a DataLoader and the process that started them see the
    same ones. An image counts once, however many epochs and workers come across it.
    """

    def __init__(self, total: int, maximum: int, path: Callable[[int], str]) -> None:
        self._marks: Tensor = torch.zeros(total, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]
        self._maximum = maximum
        self._path = path

    def __contains__(self, index: int) -> bool:
        return bool(self._marks[index])

    def __len__(self) -> int:
        return int(self._marks.sum())

    def add(self, index: int, error: Exception) -> None:
        """Count an image, and warn with its path and the reason.

        Raises:
            UnreadableImagesError: more than `maximum` images are unreadable, or all of them.
        """
        self._marks[index] = True
        reason = f"{type(error).__name__}: {error}"
        count, total = len(self), len(self._marks)
        if count > self._maximum or count == total:
            raise UnreadableImagesError(self._complaint(count, total, reason)) from error
        warnings.warn(
            f"Skipped an unreadable image: {self._path(index)} ({reason}). "
            f"{count} of {total} so far, max_unreadable={self._maximum}.",
            RuntimeWarning,
            stacklevel=2,
        )

    def refuse_all(self) -> None:
        """Fail if no image is left. Another process may have found the last one.

        Raises:
            UnreadableImagesError: all of them are unreadable.
        """
        if bool(self._marks.all()):
            total = len(self._marks)
            raise UnreadableImagesError(self._complaint(total, total, "told before, here or by another process"))

    def _complaint(self, count: int, total: int, reason: str) -> str:
        first = [self._path(int(index)) for index in self._marks.nonzero()[:_NAMED]]
        return (
            f"{count} of {total} images cannot be read, and max_unreadable={self._maximum}. The first of them: "
            f"{', '.join(first)}. The last reason: {reason}. Check that the data was copied or mounted completely "
            "and may be read by this user; delete or repair these files, or allow more: data.max_unreadable=..."
        )
