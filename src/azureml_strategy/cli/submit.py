"""submit RECIPE: submits a recipe as a job in Azure ML."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from azureml_strategy.cli.verbs import Verbs, add_verb, add_workspace_options, fail, print_text, workspace_of

_USAGE = "azureml-strategy submit RECIPE [KEY=VALUE ...] [--dry-run] [--follow] [--name NAME]"
_EPILOG = """\
examples:
  azureml-strategy submit resnet50_imagenet cluster=nd96amsr_a100_v4 cluster.num_nodes=4 --dry-run
  azureml-strategy submit my_recipe.yaml cluster=nc24ads_a100_v4 cluster.tier=low_priority --follow
  azureml-strategy submit gpt_ddp cluster=nd96isr_h100_v5 cluster.compute=serverless model=gpt_1b
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    verb = add_verb(
        verbs,
        "submit",
        _run,
        usage=_USAGE,
        help="submit a recipe as a job in Azure ML",
        description="Submit a recipe as a job in Azure ML: what `train` runs here, on the nodes of `cluster`.",
        epilog=_EPILOG,
    )
    _add_options(verb)
    verb.add_argument("recipe", metavar="RECIPE", help="name of a shipped recipe, or path of a YAML file")
    verb.add_argument(
        "rest",
        metavar="KEY=VALUE",
        nargs=argparse.REMAINDER,
        help="what to change, in Hydra's notation: of the run, `cluster` or `job`",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print the job as YAML; needs no account and no network")
    parser.add_argument("--follow", action="store_true", help="print its log until it is over, and how fast it was")
    parser.add_argument("--name", help="name of the job; submitting the same name again starts no second one")
    add_workspace_options(parser)


def _overrides(options: argparse.Namespace) -> Sequence[str]:
    """Parse the overrides and the options among them, which argparse does not allow inside a verb."""
    parser = argparse.ArgumentParser(prog="azureml-strategy submit RECIPE", usage=_USAGE)
    _add_options(parser)
    parser.add_argument("overrides", nargs="*")
    found: list[str] = parser.parse_intermixed_args(options.rest, options).overrides
    return found


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.client import import_azure
    from azureml_strategy.jobs.service_errors import JobError

    overrides = _overrides(options)
    try:
        import_azure("azure.ai.ml")  # before Hydra, which the extra `azure` brings as well
        return _print_job(options, overrides) if options.dry_run else _submit(options, overrides)
    except JobError as error:
        return fail(error)


def _print_job(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from azureml_strategy.jobs.recipe import read_recipe
    from azureml_strategy.jobs.render import build_job, job_yaml, node_price
    from azureml_strategy.jobs.submit import check_snapshot

    recipe = read_recipe(options.recipe, overrides)
    text = job_yaml(build_job(recipe, options.name, node_price(recipe, recipe.cluster.region, offline=True)))
    snapshot = check_snapshot(recipe)
    if snapshot is not None:
        _tell(". ".join(filter(None, [snapshot.describe(), snapshot.advice()])))
    print_text(text.rstrip())
    return 0


def _submit(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from azureml_strategy.jobs.follow import follow_job
    from azureml_strategy.jobs.submit import submit_recipe

    job = submit_recipe(options.recipe, overrides, workspace=workspace_of(options), name=options.name, tell=_tell)
    print_text(f"{job.name}\n{job.studio_url}")
    if not options.follow:
        return 0
    return 0 if follow_job(job) == "Completed" else 1


def _tell(line: str) -> None:
    """Print to standard error, so that standard output stays pure YAML, or a name and an address."""
    print(line, file=sys.stderr)
