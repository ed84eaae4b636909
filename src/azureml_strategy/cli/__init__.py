"""The command line `azureml-strategy VERB ...`, with one file for each verb or group of verbs.

No third-party package is imported before a verb is chosen, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from azureml_strategy import __version__
from azureml_strategy.cli import (
    bench,
    cluster,
    consolidate,
    data,
    doctor,
    emulate,
    environment,
    jobs,
    model,
    study,
    submit,
    train,
    workspace,
)
from azureml_strategy.cli.verbs import fail, print_uncaught, stopped
from azureml_strategy.lazy import missing_extra

__all__ = ["main"]

_VERBS = (
    *(train, consolidate),
    *(emulate, bench, doctor),
    *(submit, study, jobs, model),
    *(cluster, data, environment, workspace),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        arguments: the command line without the program; that of this process by default.

    Returns:
        The exit code: 0, 2 for an invalid command line, 130 after Ctrl-C, else the verb's own.
    """
    sys.excepthook = print_uncaught
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    verb: Callable[[argparse.Namespace], int] = options.verb
    try:
        return verb(options)
    except KeyboardInterrupt as interrupt:
        return stopped(interrupt)
    except ModuleNotFoundError as error:
        advice = missing_extra(error)
        if advice is None:
            raise
        return fail(advice)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="azureml-strategy", description="PyTorch Lightning on Azure Machine Learning."
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in _VERBS:
        verb.add_to(verbs)
    return parser
