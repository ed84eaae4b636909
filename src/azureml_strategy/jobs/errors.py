"""The base of what this package raises."""

from __future__ import annotations


class JobError(ValueError):
    """A job, or what it needs, cannot be had as asked; the message says what to type instead."""
