"""study: runs a recipe or a command at several sizes and compares them in one table."""

from __future__ import annotations

import argparse
from pathlib import Path

from azureml_strategy.cli.verbs import Verbs, add_unparsed_verb, fail, from_options, split_command, word_parser
from azureml_strategy.command_line import is_override

_EPILOG = """\
examples:
  azureml-strategy study resnet50_ddp --nodes 1,2 --local
  azureml-strategy study resnet50_synthetic --nodes 1,2,4,8 cluster=nd96isr_h100_v5
  azureml-strategy study --nodes 1,2 --local -- python train.py --epochs 1       # your own script, as long as it runs
  azureml-strategy study --nodes 1,2,4 cluster=nd96isr_h100_v5 -- python train.py
  azureml-strategy study --runs ID,ID                      # of MLFLOW_TRACKING_URI, or of mlflow.db here
  azureml-strategy study --runs JOB,JOB --store azureml    # of the configured workspace
exit code: 0, or 1 if a run failed or measured nothing
"""
_DESCRIPTION = "Run a recipe, or a command, at several sizes and compare throughput, scaling efficiency and cost."


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    add_unparsed_verb(verbs, "study", _run, "run a recipe at several sizes and compare speed and cost", _DESCRIPTION)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the verb's words."""
    from azureml_strategy.study.options import StudyOptions

    parser = word_parser(
        "study",
        usage="%(prog)s RECIPE --nodes N,N [options] [KEY=VALUE ...]\n"
        "       %(prog)s --nodes N,N [options] [KEY=VALUE ...] -- COMMAND ...\n"
        "       %(prog)s --runs ID,ID [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a shipped recipe, or path of a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in it, at every size")
    parser.add_argument("--nodes", metavar="N,N", help="sizes, in nodes: 1,2,4,8")
    parser.add_argument(
        "--processes-per-node", type=int, metavar="N", help="default: one, emulated; the GPUs of a node, submitted"
    )
    parser.add_argument("--local", action="store_true", help="emulate the jobs here instead of submitting them")
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps of each run of a recipe, without validation (default 100); 0: as long as the recipe",
    )
    parser.add_argument("--runs", metavar="ID,ID", help="read these MLflow runs instead of starting any")
    parser.add_argument("--store", metavar="URI", help="where --runs are; azureml is the configured workspace")
    parser.add_argument("--price-per-hour", type=float, metavar="X", help="of one node, for runs that know no price")
    parser.add_argument("--currency", default=StudyOptions.currency, help="of that price (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", default=StudyOptions.output)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", default=StudyOptions.plot)
    return parser


def _run(options: argparse.Namespace) -> int:
    words, command = split_command(options.words)
    options = make_parser().parse_intermixed_args(words)
    if command and options.recipe is not None and is_override(options.recipe):
        options.recipe, options.overrides = None, [options.recipe, *options.overrides]
    from azureml_strategy.jobs import JobError
    from azureml_strategy.study import StudyError, StudyOptions, run_study
    from azureml_strategy.study.options import parse_list, parse_nodes
    from azureml_strategy.tracking.store import TrackingError

    try:
        return run_study(
            from_options(
                StudyOptions,
                options,
                command=command or [],
                nodes=parse_nodes(options.nodes),
                runs=parse_list(options.runs),
            )
        )
    except (StudyError, JobError, TrackingError) as error:
        return fail(error)
