"""completion SHELL: prints the script by which bash, zsh or fish completes the command line, by argcomplete."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from azureml_strategy.cli.verbs import Parser, Verbs, add_verb

_DESCRIPTION = "Print the script by which a shell completes this command: verbs, options, recipes, groups, keys."
_EPILOG = """\
in this shell, and in every new one if the line is in the file beside it:
  eval "$(azureml-strategy completion bash)"     # ~/.bashrc
  eval "$(azureml-strategy completion zsh)"      # ~/.zshrc, below `autoload -U compinit; compinit`
  azureml-strategy completion fish | source      # ~/.config/fish/config.fish
"""
# Groups whose keys are the same for every choice.
_ONE_FORM = ("cluster", "job", "trainer")


def add_to(verbs: Verbs) -> None:
    """Add the verb and its argument."""
    summary = "let the shell complete verbs, options, recipes and groups"
    verb = add_verb(verbs, "completion", _run, summary, _DESCRIPTION, _EPILOG)
    verb.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def _run(options: argparse.Namespace) -> None:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["azureml-strategy"], shell=options.shell))


def complete(parser: argparse.ArgumentParser, own_parsers: Mapping[str, Callable[[], argparse.ArgumentParser]]) -> None:
    """Answer the shell that asks how the command line may go on, and end the process.

    Args:
        parser: of the whole command line.
        own_parsers: by the name of each verb that `add_unparsed_verb` has added, what makes the parser of its words.
    """
    from argcomplete import autocomplete

    before = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
    verb = before[1] if len(before) > 2 else ""
    if verb in own_parsers:
        os.environ["_ARGCOMPLETE"] = "2"  # the words begin with the second one
        parser = _intermixed(own_parsers[verb]())
    autocomplete(parser, always_complete_options=False, default_completer=candidates)  # type: ignore[arg-type]


def _intermixed(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make the parser accept words on both sides of an option for argcomplete, which calls `parse_known_args`."""
    plain = parser.parse_known_args

    def parse(words: Sequence[str], namespace: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
        parser.parse_known_args = plain  # type: ignore[method-assign]  # the next line calls it
        return parser.parse_known_intermixed_args(words, namespace)

    parser.parse_known_args = parse  # type: ignore[method-assign,assignment]
    return parser


def candidates(
    prefix: str, action: argparse.Action, parser: argparse.ArgumentParser, parsed_args: argparse.Namespace
) -> Iterable[str]:
    """A completer of argcomplete: the words that may stand for an argument, by the argument's metavar.

    `RECIPE` in it stands for a shipped recipe or a YAML file, `SCRIPT` for a Python file, `KEY=VALUE` of a positional
    for an override of a recipe, `VM_SIZE` for a size; FILE, FOLDER and PATH for a path.
    """
    from argcomplete.completers import DirectoriesCompleter, FilesCompleter

    from azureml_strategy.training.recipes import config_groups, shipped_recipes

    metavar = str(action.metavar or "")
    if prefix.startswith("-") and isinstance(parser, Parser):  # after words that argparse leaves unparsed
        return parser.option_names()
    found: list[str] = []
    if "RECIPE" in metavar:
        found += [*(recipe.name for recipe in shipped_recipes()), *FilesCompleter(("yaml",))(prefix)]
    if "SCRIPT" in metavar:
        found += FilesCompleter(("py",))(prefix)
    if metavar == "KEY=VALUE" and not action.option_strings:
        found += overrides(prefix)
    if metavar == "VM_SIZE":
        found += [size for size in config_groups()["cluster"] if size != "default"]
    if metavar == "FOLDER":
        found += DirectoriesCompleter()(prefix=prefix)
    elif action.type is Path or any(word in metavar for word in ("FILE", "PATH", "COMMAND")):
        found += FilesCompleter()(prefix)
    return found


def overrides(prefix: str) -> Iterator[str]:
    """The overrides that may begin with a prefix: a group and its choices, a section and its keys, keys of recipes."""
    from azureml_strategy.training.recipes import config_groups

    group, equals, _ = prefix.partition("=")
    groups = config_groups()
    if equals:
        yield from (f"{group}={choice}" for choice in groups.get(group, ()))
        return
    section = prefix.partition(".")[0]
    if "." in prefix and section in _ONE_FORM:
        names = ("plain", "default") if section == "job" else ("default",)  # the second starts from the first
        keys = (key for name in names for key in _keys(_conf(f"{section}/{name}.yaml"), section))
        yield from dict.fromkeys(f"{key}=" for key in keys if not key.endswith(".defaults"))
    elif "." not in prefix:
        yield from (f"{name}=" for name in groups)
        yield from (f"{key}=" for key in _conf("base.yaml") if key not in ("defaults", "hydra"))


def _conf(file: str) -> dict[str, Any]:
    from importlib.resources import files

    import yaml

    content: dict[str, Any] = yaml.safe_load(files("azureml_strategy.conf").joinpath(file).read_text(encoding="utf-8"))
    return content


def _keys(node: Mapping[str, Any], path: str) -> Iterator[str]:
    """The dotted key of every value."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _keys(value, f"{path}.{name}")
        else:
            yield f"{path}.{name}"
