"""Cleans up what a run prints: no duplicate lines, no useless lines and no secrets."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from azureml_strategy.cluster.redaction import redact_text


@contextlib.contextmanager
def discreet_console() -> Iterator[None]:
    """Remove secrets from what this process prints: log lines, tracebacks, and the output of the user's code.

    Output that does not pass through Python, such as NCCL's, is not filtered.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = DiscreetStream(sys.stdout), DiscreetStream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class DiscreetStream:
    """A text stream that removes secrets. Everything else is passed to the wrapped stream.

    Args:
        stream: where the text goes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text without secrets.

        Returns:
            The length of the given text, as a stream returns that takes all of it.
        """
        self._stream.write(redact_text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all lines without secrets."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _DiscreetFormatter(logging.Formatter):
    """Wraps a formatter and removes secrets from its lines."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self._formatter = formatter

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(self._formatter.format(record))


def tidy_console() -> None:
    """Leave only Hydra's handler and useful lines on the console. Call it after the import of Lightning.

    Lightning adds its own handler beside Hydra's, so that each of its lines appears twice, and its info lines contain
    advertisements. Its warnings stay. If Hydra also logs into a file, secrets are removed there too.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.setFormatter(_DiscreetFormatter(handler.formatter or logging.Formatter()))
    logging.getLogger("lightning").handlers.clear()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # torch 2.13 deprecates a call that Lightning 2.6 makes; a user can do nothing about it.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
