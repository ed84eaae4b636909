"""Shared parts of the command line's verbs: the parser, which names the words that a misspelt one may have meant,
options, errors, and the connection to Azure.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from azureml_strategy.cluster.redaction import redact_text, without_secrets

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

    from azureml_strategy.jobs.client import WorkspaceSettings
Entity = TypeVar("Entity", bound=Any)
Made = TypeVar("Made")
Run = Callable[[argparse.Namespace], int]


if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction["Parser"]
else:
    Verbs = argparse._SubParsersAction


class Parser(argparse.ArgumentParser):
    """A parser of the command line, of a verb, or of a group of verbs.

    Attributes:
        details: what the help ends with. It is called when the help is printed, since it may read files.
        about_options: what to say about an option that does not exist, besides the near ones.
    """

    details: Callable[[], str] | None = None
    about_options: str = ""
    _verbs: Verbs | None = None

    def add_verbs(self) -> Verbs:
        """Make this the parser of verbs."""
        self._verbs = self.add_subparsers(title="verbs", metavar="VERB", required=True)
        return self._verbs

    def option_names(self) -> list[str]:
        """Every option, such as `--nodes`."""
        return sorted(self._option_string_actions)

    def format_help(self) -> str:
        """The help, with `details` at its end."""
        return super().format_help() + (f"\n{self.details()}" if self.details else "")

    def wrong_verb(self, words: Sequence[str]) -> str | None:
        """Say what is wrong with the verb at the beginning of the words.

        Args:
            words: what follows the parser's own name.

        Returns:
            The message; None if there is such a verb, or if an option stands in its place.
        """
        if self._verbs is None or (words and words[0].startswith("-")):
            return None
        verbs = self._verbs.choices
        known = f"`{self.prog} --help` says what each does."
        if not words:
            return f"A verb is missing after `{self.prog}`: {', '.join(verbs)}. {known}"
        if words[0] in verbs:
            return verbs[words[0]].wrong_verb(words[1:])
        from azureml_strategy.training.recipes import near_matches

        wrong = " ".join([*self.prog.split()[1:], words[0]])
        return f"There is no verb {wrong!r}. {near_matches(words[0], verbs)} {known}"

    def wrong_words(self, words: Sequence[str]) -> str:
        """Say what is wrong with words that this parser does not know."""
        from azureml_strategy.training.recipes import near_matches

        known = f"`{self.prog} --help` lists what it takes."
        option = next((word.split("=")[0] for word in words if word.startswith("-")), None)
        if option is None:
            return f"{self.prog} takes no {words[0]!r}. {known}"
        near = near_matches(option, self.option_names())
        wrong = f"{self.prog} has no option {option!r}."
        return " ".join(filter(None, (wrong, near if "mean" in near else "", self.about_options, known)))


def add_verb(verbs: Verbs, name: str, run: Callable[[argparse.Namespace], int], **described: Any) -> Parser:
    """Add a verb.

    Args:
        verbs: result of `Parser.add_verbs`, for the command line or for a verb with sub-verbs.
        name: name that the user types.
        run: function that takes the options and returns the exit code.
        described: help, description, usage and epilog, as `argparse.ArgumentParser` takes them. Description and epilog
            keep their line breaks.

    Returns:
        The verb's parser, to which the caller adds arguments.
    """
    parser = verbs.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **described)
    parser.set_defaults(verb=run, parser=parser)
    return parser


def add_unparsed_verb(verbs: Verbs, name: str, run: Run, **described: Any) -> None:
    """Add a verb that takes every word unparsed, and parses the words before `--` with a `word_parser` of its own.

    Inside a verb, argparse of Python 3.10 and 3.11 does not accept positionals on both sides of an option; a parser of
    its own does, by `parse_intermixed_args`. The option prefix here is the null character, with which no word starts.
    """
    verb = add_verb(verbs, name, run, prefix_chars="\0", add_help=False, **described)
    verb.add_argument("words", nargs=argparse.REMAINDER)


def word_parser(name: str, **described: Any) -> argparse.ArgumentParser:
    """Make the parser of the words of a verb that `add_unparsed_verb` has added."""
    return argparse.ArgumentParser(
        prog=f"azureml-strategy {name}", formatter_class=argparse.RawDescriptionHelpFormatter, **described
    )


def split_command(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The words before the first `--`, and those after it; None if there is no `--`."""
    if "--" not in words:
        return list(words), None
    place = list(words).index("--")
    return list(words[:place]), list(words[place + 1 :])


_LINES, _COLOURS = "\n\t", "\x1b"


def print_text(text: str) -> None:
    """Print text without secrets, and end quietly if the reader, such as `head`, has closed the pipe.

    See "Note on SIGPIPE" in the Python documentation. Subscription ids stay, since the user needs addresses with them.
    """
    try:
        print(_without_controls(without_secrets(text), _LINES + _COLOURS), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stopped(interrupt: KeyboardInterrupt) -> int:
    """Print a sentence about Ctrl-C to standard error, and return 130, a shell's exit code for it."""
    print(f"azureml-strategy: {redact_text(str(interrupt)) or 'stopped by Ctrl-C.'}", file=sys.stderr)
    return 130


def print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print Python's traceback without the secrets that the error may contain; a function for `sys.excepthook`."""
    sys.stderr.write(redact_text("".join(traceback.format_exception(kind, error, trace))))


def fail(error: Exception | str) -> int:
    """Print to standard error what was wrong with the command, and return exit code 2."""
    print(f"azureml-strategy: {_without_controls(redact_text(str(error)), _LINES)}", file=sys.stderr)
    return 2


def _without_controls(text: str, kept: str) -> str:
    """Text that a terminal shows and any encoding writes: names of files may hold anything but a slash."""
    return "".join(each if each.isprintable() or each in kept else ascii(each)[1:-1] for each in text)


def add_group(verbs: Verbs, name: str, help: str) -> Verbs:  # noqa: A002 - argparse's name for it
    """Add a verb that has sub-verbs, such as `cluster` with `create`."""
    return verbs.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.").add_verbs()


def add_workspace_options(verb: argparse.ArgumentParser) -> None:
    """Add the options that name the workspace. config.json, variables and az's defaults fill in missing ones."""
    group = verb.add_argument_group("workspace", "by default that of config.json, of variables, or the az command's")
    group.add_argument("--subscription", metavar="ID", help="id of the subscription")
    group.add_argument("--resource-group", metavar="NAME", help="resource group of the workspace")
    group.add_argument("--workspace", metavar="NAME", help="name of the workspace")


def add_create_options(verb: argparse.ArgumentParser) -> None:
    """Add the options of every verb that creates something."""
    verb.add_argument("--tag", metavar="KEY=VALUE", action="append", type=_tag, help="a tag; may be repeated")
    add_dry_run(verb)


def add_dry_run(verb: argparse.ArgumentParser) -> None:
    """Add the option by which `make` prints an entity in place of creating it."""
    verb.add_argument("--dry-run", action="store_true", help="print the YAML and make nothing; needs no sign-in")


def add_version_option(verb: argparse.ArgumentParser) -> None:
    """Add the option that names the version of what is registered."""
    verb.add_argument("--version", metavar="VERSION", help="default: the next number")


def add_recipe_arguments(verb: argparse.ArgumentParser, **overrides: Any) -> None:
    """Add a recipe, and the overrides of it as `add_argument` describes them."""
    verb.add_argument("recipe", metavar="RECIPE", help="name of a shipped recipe, or path of a YAML file")
    verb.add_argument("overrides", metavar="KEY=VALUE", **overrides)


def add_checkpoint_options(verb: argparse.ArgumentParser) -> None:
    """Add the options that tell of a module what its checkpoint does not, and the one that trusts the checkpoint."""
    verb.add_argument("--module-class", metavar="MODULE.CLASS", help="class of the module, if not as recorded")
    verb.add_argument(
        "--input-shape", type=_sizes, metavar="SIZES", help="of one sample, such as 3,32,32, if not as recorded"
    )
    verb.add_argument(
        "--input-dtype", choices=("float32", "uint8", "int64"), help="with --input-shape: float32 if left out"
    )
    verb.add_argument(
        "--trust-pickles",
        action="store_true",
        help="run the code that the checkpoint's files ask for: you trust who wrote them",
    )


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes. Write one number for each dimension: 3,32,32")
    return tuple(int(part) for part in parts)


def make(options: argparse.Namespace, wanted: Entity, create: Callable[[MLClient, Entity], Made]) -> Made | None:
    """Create an entity, or print its YAML with --dry-run.

    Returns:
        The created entity; None with --dry-run.
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
    """The parts of the workspace that the options name."""
    from azureml_strategy.jobs.client import WorkspaceSettings

    return WorkspaceSettings(options.subscription, options.resource_group, options.workspace)


def client(options: argparse.Namespace) -> MLClient:
    """Make the client for the workspace that the options name."""
    from azureml_strategy.jobs.client import connect

    return connect(workspace_of(options))


def refusing(run: Run) -> Run:
    """Decorate a verb to print a `JobError` to standard error and return exit code 2."""

    @functools.wraps(run)
    def with_errors_printed(options: argparse.Namespace) -> int:
        from azureml_strategy.jobs.service_errors import JobError

        try:
            return run(options)
        except JobError as error:
            return fail(error)

    return with_errors_printed
