"""What the command line's verbs share: the parser, options, errors and the connection to Azure.

The parser answers a misspelt word with those that were probably meant.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from azureml_strategy.cluster.redaction import redact_text, without_secrets

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

    from azureml_strategy.jobs.client import WorkspaceSettings
Entity = TypeVar("Entity", bound=Any)
Made = TypeVar("Made", bound=Any)
Run = Callable[[argparse.Namespace], int | None]
"""Runs a verb, and returns the exit code; None stands for 0."""
Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


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


def add_verb(
    verbs: Verbs, name: str, run: Run, summary: str, description: str = "", epilog: str = "", **described: Any
) -> Parser:
    """Add a verb.

    Args:
        verbs: result of `Parser.add_verbs`, for the command line or for a verb with sub-verbs.
        name: name that the user types.
        run: function that takes the options and returns the exit code, or None for 0.
        summary: what the list of verbs says of it.
        description: what its own help says of it, line breaks included; by default the summary.
        epilog: the end of its own help, line breaks included.
        described: further arguments of `argparse.ArgumentParser`.

    Returns:
        The verb's parser, to which the caller adds arguments.
    """
    parser = verbs.add_parser(
        name,
        help=summary,
        description=description or _as_sentence(summary),
        epilog=epilog or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **described,
    )
    parser.set_defaults(verb=run, parser=parser)
    return parser


def _as_sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def add_azure_verb(verbs: Verbs, name: str, run: Run, *described: str) -> Parser:
    """Add a verb that works in a workspace; a `JobError` is printed as by `fail`. See `add_verb` for the arguments."""

    def print_errors(options: argparse.Namespace) -> int | None:
        from azureml_strategy.jobs.service_errors import JobError

        try:
            return run(options)
        except JobError as error:
            return fail(error)

    return add_verb(verbs, name, print_errors, *described)


def add_unparsed_verb(verbs: Verbs, name: str, run: Run, *described: str) -> None:
    """Add a verb that takes every word unparsed, and parses the words before `--` with a `word_parser` of its own.

    Inside a verb, argparse of Python 3.10 and 3.11 does not accept positionals on both sides of an option; a parser of
    its own does, by `parse_intermixed_args`. The option prefix here is the null character, with which no word starts.
    """
    verb = add_verb(verbs, name, run, *described, prefix_chars="\0", add_help=False)
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


def add_group(verbs: Verbs, name: str, summary: str) -> Verbs:
    """Add a verb that has sub-verbs, such as `cluster` with `create`."""
    return verbs.add_parser(name, help=summary, description=_as_sentence(summary)).add_verbs()


def add_workspace_options(*verbs: argparse.ArgumentParser) -> None:
    """Add the options that name the workspace. config.json, variables and az's defaults fill in missing ones."""
    for verb in verbs:
        where = verb.add_argument_group(
            "workspace", "by default that of config.json, of variables, or the az command's"
        )
        where.add_argument("--subscription", metavar="ID", help="id of the subscription")
        where.add_argument("--resource-group", metavar="NAME", help="resource group of the workspace")
        where.add_argument("--workspace", metavar="NAME", help="name of the workspace")


def add_create_options(verb: argparse.ArgumentParser) -> None:
    """Add the options of every verb that creates something."""
    verb.add_argument("--tag", metavar="KEY=VALUE", action=_AddTag, dest="tags", help="a tag; may be repeated")
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
    """Add the options that describe a module as far as its checkpoint does not, and the one that trusts pickles."""
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


class _AddTag(argparse.Action):
    """Collects `KEY=VALUE` into a dictionary."""

    def __call__(self, parser: argparse.ArgumentParser, options: argparse.Namespace, text: Any, *_: object) -> None:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise argparse.ArgumentError(self, f"{text!r} is no KEY=VALUE")
        options.tags = {**(options.tags or {}), key: value}


def from_options(kind: type[Made], options: argparse.Namespace, **given: Any) -> Made:
    """Make a dataclass whose fields are the given values, and else the options of the same names.

    `set_defaults` of a parser adds options, too: `verb` and `parser` are no names for a field.
    """
    named = {field.name for field in fields(kind)} & vars(options).keys()
    made: Made = kind(**{name: getattr(options, name) for name in named} | given)
    return made


def make(
    options: argparse.Namespace,
    wanted: Entity,
    create: Callable[[MLClient, Entity], Made],
    describe: Callable[[Made], str],
) -> Made | None:
    """Create an entity and print its description, or print its YAML with --dry-run.

    Returns:
        The created entity; None with --dry-run.
    """
    from azureml_strategy.jobs.client import as_yaml

    if options.dry_run:
        print_text(as_yaml(wanted).rstrip())
        return None
    made = create(client(options), wanted)
    print_text(describe(made))
    return made


def workspace_of(options: argparse.Namespace) -> WorkspaceSettings:
    """The parts of the workspace that the options name."""
    from azureml_strategy.jobs.client import WorkspaceSettings

    return WorkspaceSettings(options.subscription, options.resource_group, options.workspace)


def client(options: argparse.Namespace) -> MLClient:
    """Make the client for the workspace that the options name."""
    from azureml_strategy.jobs.client import connect

    return connect(workspace_of(options))
