# PYTHON_ARGCOMPLETE_OK
"""The command line `azureml-strategy VERB ...`, with one file for each verb or group of verbs.

No third-party package is imported before a verb is chosen, so that `--help` answers at once. There is one exception:
argcomplete, while a shell completes a command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from azureml_strategy.cli import (
    bench,
    cluster,
    completion,
    consolidate,
    data,
    doctor,
    emulate,
    environment,
    init,
    jobs,
    model,
    plan,
    profile,
    report,
    study,
    submit,
    train,
    tune,
    workspace,
)
from azureml_strategy.cli.verbs import Parser, Run, fail, print_uncaught, stopped
from azureml_strategy.lazy import missing_extra

__all__ = ["main"]

_VERBS = (
    *(init, train, profile, consolidate),
    *(emulate, bench, tune, doctor),
    *(plan, submit, study, report, jobs, model),
    *(cluster, data, environment, workspace),
    completion,
)
# Printed where no verb was typed: the shortest way to a first run, and on from there.
_FIRST_STEPS = """\
azureml-strategy needs a verb. A first run, of two nodes that are played on this machine:
  azureml-strategy init my_project
  cd my_project
  azureml-strategy emulate --nodes 2 -- python train.py
A script of your own, as it is:
  azureml-strategy emulate --nodes 2 -- python your_script.py
A recipe, which needs no script; `azureml-strategy recipes` lists them:
  azureml-strategy train resnet50_ddp trainer.max_epochs=1
Every verb: azureml-strategy --help; what one takes: azureml-strategy VERB --help
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        arguments: the command line without the program; that of this process by default.

    Returns:
        The exit code: 0, 2 for an invalid command line, 130 after Ctrl-C, else the verb's own.
    """
    sys.excepthook = print_uncaught
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        completion.complete(
            parser, {"study": study.make_parser, "submit": submit.make_parser, "tune": tune.make_parser}
        )
    if not arguments:
        sys.stderr.write(_FIRST_STEPS)
        return 2
    wrong = parser.wrong_verb(arguments)
    if wrong is not None:
        return fail(f"{wrong}{_verb_for(arguments[0])}")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        return fail(getattr(options, "parser", parser).wrong_words(unknown))
    verb: Run = options.verb
    try:
        return verb(options) or 0
    except KeyboardInterrupt as interrupt:
        return stopped(interrupt)
    except ModuleNotFoundError as error:
        advice = missing_extra(error)
        if advice is None:
            raise
        return fail(advice)


def _verb_for(word: str) -> str:
    """What to type where a script or a recipe stands in place of a verb."""
    from azureml_strategy.training.recipes import shipped_recipes

    if word.endswith(".py"):
        return f" A script runs as a job by: azureml-strategy emulate --nodes 2 -- python {word}"
    if word.endswith(".yaml") or word in [recipe.name for recipe in shipped_recipes()]:
        return f" A recipe is trained by: azureml-strategy train {word}"
    return ""


class _Version(argparse.Action):
    """Looks the version up when it is asked for: that takes longer than the rest of the command line."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from azureml_strategy import __version__

        print(__version__)
        parser.exit()


def _parser() -> Parser:
    parser = Parser(prog="azureml-strategy", description="PyTorch Lightning on Azure Machine Learning.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version, and exit")
    verbs = parser.add_verbs()
    for verb in _VERBS:
        verb.add_to(verbs)
    return parser
