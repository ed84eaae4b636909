"""What the verbs of the command line have in common: options, errors, and a connection to Azure."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from azureml_strategy.cluster.redaction import redact_text, without_secrets

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

    from azureml_strategy.jobs.places import WorkspaceSettings


if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Verbs = argparse._SubParsersAction

Entity = TypeVar("Entity", bound=Any)
Made = TypeVar("Made")
Run = Callable[[argparse.Namespace], int]


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


def add_group(verbs: Verbs, name: str, help: str) -> Verbs:  # noqa: A002 - argparse's name for it
    """Add a verb that has verbs of its own, such as `cluster create`."""
    parser = verbs.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
    return parser.add_subparsers(title="verbs", metavar="VERB", required=True)


def add_workspace_options(verb: argparse.ArgumentParser) -> None:
    """Add the options that say which workspace is meant; config.json, variables and az's defaults fill what is left."""
    group = verb.add_argument_group("workspace", "by default that of config.json, of variables, or the az command's")
    group.add_argument("--subscription", metavar="ID", help="id of the subscription")
    group.add_argument("--resource-group", metavar="NAME", help="resource group of the workspace")
    group.add_argument("--workspace", metavar="NAME", help="name of the workspace")


def add_create_options(verb: argparse.ArgumentParser) -> None:
    """Add what every verb that makes something has."""
    verb.add_argument("--tag", metavar="KEY=VALUE", action="append", type=_tag, help="a tag; may be repeated")
    verb.add_argument("--dry-run", action="store_true", help="print the YAML and make nothing; needs no sign-in")


def make(options: argparse.Namespace, wanted: Entity, create: Callable[[MLClient, Entity], Made]) -> Made | None:
    """Make what is wanted; with --dry-run print its YAML instead.

    Returns:
        What was made; None with --dry-run.
    """
    from azureml_strategy.jobs.client import as_yaml

    if options.dry_run:
        print_text(as_yaml(wanted).rstrip())
        return None
    return create(client(options), wanted)


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE")
    return key, value


def workspace_of(options: argparse.Namespace) -> WorkspaceSettings:
    """What the options say of the workspace."""
    from azureml_strategy.jobs.places import WorkspaceSettings

    return WorkspaceSettings(options.subscription, options.resource_group, options.workspace)


def client(options: argparse.Namespace) -> MLClient:
    """The client for the workspace that the options name."""
    from azureml_strategy.jobs.client import connect

    return connect(workspace_of(options))


def refusing(run: Run) -> Run:
    """A verb whose refusals are told on standard error, with exit code 2."""

    @functools.wraps(run)
    def told(options: argparse.Namespace) -> int:
        from azureml_strategy.jobs.service_errors import JobError

        try:
            return run(options)
        except JobError as error:
            return fail(error)

    return told
