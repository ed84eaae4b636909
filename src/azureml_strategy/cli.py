"""The command line: azureml-strategy VERB ...

Only the standard library is imported before a verb is chosen, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from azureml_strategy import __version__

_TRAIN_EPILOG = """\
examples:
  azureml-strategy train resnet50_ddp trainer.max_epochs=1 data.batch_size=64
  azureml-strategy train my_recipe.yaml          # starts with: defaults: [resnet50_ddp, _self_]
  azureml-strategy train resnet50_ddp --cfg job  # print the configuration and stop
  azureml-strategy train resnet50_ddp -m model.learning_rate=0.1,0.2
"""
_EMULATE_EPILOG = """\
examples:
  azureml-strategy emulate --nodes 2 --processes-per-node 2 -- python train.py
  azureml-strategy emulate --nodes 2 --distribution mpi -- azureml-strategy train resnet50_ddp
  sudo azureml-strategy emulate --nodes 2 --isolate --bandwidth 1gbit -- python train.py
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        arguments: the command line without the program; this process's own by default.

    Returns:
        The exit code: 0, 2 for a wrong command line, else the verb's own.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    verb: Callable[[argparse.Namespace], int] = options.verb
    return verb(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="azureml-strategy", description="PyTorch Lightning on Azure Machine Learning."
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_train(verbs)
    _add_emulate(verbs)
    recipes = verbs.add_parser("recipes", help="list the shipped recipes", description="List the shipped recipes.")
    recipes.set_defaults(verb=_recipes)
    return parser


def _add_train(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = verbs.add_parser(
        "train",
        usage="azureml-strategy train RECIPE [KEY=VALUE ...]",
        help="train a recipe",
        description="Train a recipe: a shipped one by name, or your own YAML file by path.",
        epilog=_TRAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("recipe", metavar="RECIPE", help="name of a shipped recipe, or path of a YAML file")
    train.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs=argparse.REMAINDER,
        help="what to change, in Hydra's notation; Hydra's own flags work too",
    )
    train.set_defaults(verb=_train)


def _add_emulate(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    emulate = verbs.add_parser(
        "emulate",
        usage="azureml-strategy emulate [options] -- COMMAND ...",
        help="run a command here as an Azure ML job would",
        description="Run a command on emulated nodes, with the variables an Azure ML job gets.",
        epilog=_EMULATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    emulate.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the job (default 1)")
    emulate.add_argument(
        "--processes-per-node", type=int, default=1, metavar="N", help="processes on each node (default 1)"
    )
    emulate.add_argument(
        "--distribution",
        default="pytorch",
        help="pytorch (default), mpi, tensorflow, or none for a job without a distribution block",
    )
    emulate.add_argument("--isolate", action="store_true", help="a network namespace for each node (Linux, root)")
    emulate.add_argument("--bandwidth", metavar="RATE", help="rate of each node's link, such as 1gbit (with --isolate)")
    emulate.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what each process runs")
    emulate.set_defaults(verb=_emulate)


def _train(options: argparse.Namespace) -> int:
    from azureml_strategy.training.app import run_recipe
    from azureml_strategy.training.errors import RecipeError

    try:
        run_recipe(options.recipe, options.overrides)
    except RecipeError as error:
        return _fail(error)
    return 0


def _emulate(options: argparse.Namespace) -> int:
    from azureml_strategy.emulator import EmulatedJob, EmulationError, emulate

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        job = EmulatedJob(
            command=command,
            nodes=options.nodes,
            processes_per_node=options.processes_per_node,
            distribution=options.distribution,
            isolate=options.isolate,
            bandwidth=options.bandwidth,
        )
        return emulate(job)
    except EmulationError as error:
        return _fail(error)


def _recipes(options: argparse.Namespace) -> int:
    from azureml_strategy.training.catalogue import shipped_recipes

    for recipe in shipped_recipes():
        print(f"{recipe.name:22} {recipe.summary}")
    return 0


def _fail(error: Exception) -> int:
    print(f"azureml-strategy: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
