"""Quotes the arguments of a program exactly, for the shell of a job and for Hydra's notation."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Collection

from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.training.recipes import near_matches

# What Azure ML replaces in a command.
REFERENCE = re.compile(r"\$\{\{\s*((?:inputs|outputs|search_space)\.\w+)\s*\}\}")
_MEANT = re.compile(r"\$\{\{\s*(?:inputs|outputs|search_space)\b[^}]*\}\}")
# azure-ai-ml makes references of an older form, `{inputs.x}`, as well.
_BRACKETS = re.compile(r"\{(?=\{|inputs\.|outputs\.|search_space\.)")


def quote_argument(argument: str, references: Collection[str]) -> str:
    """Quote an argument for the shell of a job, so that the program gets exactly this text.

    A reference such as `${{inputs.images}}` stands in double quotes: Azure ML writes a path there, or a variable that
    holds it. Nothing else in the result looks like a reference, to Azure ML or to azure-ai-ml.

    Args:
        argument: any text without a null character.
        references: the references that there are, as `inputs.images`.

    Raises:
        JobError: the argument names an input, output or hyperparameter that there is not.
    """
    if "\0" in argument:
        raise JobError(f"The argument {argument!r} contains a null character, which no command line can hold.")
    check_references(argument, references)
    parts = REFERENCE.split(argument)  # text and names in turn
    quoted = [_quote_text(part) if number % 2 == 0 else f'"${{{{{part}}}}}"' for number, part in enumerate(parts)]
    return "".join(quoted) or "''"


def _quote_text(text: str) -> str:
    """Quote text for the shell; every `{` that could begin a reference ends a quoted part."""
    ends = [0, *(found.start() + 1 for found in _BRACKETS.finditer(text)), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(ends)]
    return "".join(shlex.quote(part) for part in parts if part)


def check_references(text: str, references: Collection[str]) -> None:
    """Check that each reference in a command or argument names something that there is.

    Raises:
        JobError: one does not; the message names the near matches.
    """
    for meant in _MEANT.findall(text):
        found = REFERENCE.fullmatch(meant)
        if found is None or found[1] not in references:
            known = [f"${{{{{each}}}}}" for each in references]
            near = near_matches(meant, known) if known else "There is none."
            raise JobError(
                f"{meant} refers to no input or output of this job. {near} An input is declared by --input NAME=PATH, "
                "an output by --output NAME."
            )


def hydra_text(text: str) -> str:
    """Quote any text as a value in Hydra's notation."""
    escaped = re.sub(r"(\\*)'", lambda found: f"{found[1]}{found[1]}\\'", text.replace("${", r"\${"))
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{escaped[len(escaped) - trailing :]}'"
