"""The one error of this package."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """The job cannot be emulated here as asked; the message says why and what to type instead."""
