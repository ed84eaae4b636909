"""The one error of this package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class LaunchError(RuntimeError):
    """The environment or the Trainer contradicts how the job was launched.

    The message says what was seen (variables and their values), why it cannot be right, and what to type instead.
    """


def seen(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """`NAME='value'` for each name, or `NAME is not set`, joined for an error message."""
    return ", ".join(f"{name}={environ[name]!r}" if name in environ else f"{name} is not set" for name in names)
