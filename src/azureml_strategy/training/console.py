"""What a run prints: each line once, none that a reader cannot use, and no secret."""

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
    """What this process prints meanwhile tells no secret: lines of logs, tracebacks, and what the user's code prints.

    What is written past Python, as by NCCL, is not looked through.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = DiscreetStream(sys.stdout), DiscreetStream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class DiscreetStream:
    """A stream of text without its secrets; all else is the stream's own.

    Args:
        stream: where the text goes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text without secrets.

        Returns:
            The length of the given text, as a stream that takes all of it.
        """
        self._stream.write(redact_text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of them."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _DiscreetFormatter(logging.Formatter):
    """Another formatter's lines without secrets."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self._formatter = formatter

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(self._formatter.format(record))


def tidy_console() -> None:
    """Leave the console to Hydra's handler and to what matters; call it after Lightning was imported.

    Lightning adds a handler of its own beside Hydra's, so that each of its lines appears twice, and its remarks
    hold advertisements. Its warnings stay. Where Hydra logs into a file as well, that tells no secret either.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.setFormatter(_DiscreetFormatter(handler.formatter or logging.Formatter()))
    logging.getLogger("lightning").handlers.clear()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # torch 2.13 deprecates what Lightning 2.6 asks of it; a user can do nothing about it.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
