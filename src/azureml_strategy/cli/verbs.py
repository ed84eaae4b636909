"""What every verb of the command line shares."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from azureml_strategy.cluster.redaction import redact_text, without_secrets

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Verbs = argparse._SubParsersAction


def add_verb(
    verbs: Verbs, name: str, run: Callable[[argparse.Namespace], int], **described: Any
) -> argparse.ArgumentParser:
    """Add a verb.

    Args:
        verbs: what `add_subparsers` returned: of the command line, or of a verb that has verbs of its own.
        name: what the user types.
        run: called with the options; returns the exit code.
        described: help, description, usage and epilog, as `argparse.ArgumentParser` takes them. Lines of the
            epilog stay as they are.

    Returns:
        The verb's parser, for its arguments.
    """
    parser = verbs.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **described)
    parser.set_defaults(verb=run)
    return parser


def print_text(text: str) -> None:
    """Print without secrets, and end quietly where the reader has gone, as `head` does.

    See "Note on SIGPIPE" of the Python documentation. Subscriptions stay: they are parts of addresses to go on with.
    """
    try:
        print(without_secrets(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stopped(interrupt: KeyboardInterrupt) -> int:
    """Say in a sentence that Ctrl-C has ended the command; 130, a shell's exit code for that."""
    print(f"azureml-strategy: {redact_text(str(interrupt)) or 'stopped by Ctrl-C.'}", file=sys.stderr)
    return 130


def print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own traceback, without the secrets that may stand in the error: for `sys.excepthook`."""
    sys.stderr.write(redact_text("".join(traceback.format_exception(kind, error, trace))))


def fail(error: Exception) -> int:
    """Say on standard error what was wrong with the command; 2, the exit code for that."""
    print(f"azureml-strategy: {redact_text(str(error))}", file=sys.stderr)
    return 2
