"""The one error of this package."""

from __future__ import annotations


class StudyError(ValueError):
    """The study cannot be made as asked; the message says what to type instead."""
