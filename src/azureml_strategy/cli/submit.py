"""submit PROGRAM: submits a script, a command or a recipe as a job in Azure ML, or a sweep of such jobs."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from azureml_strategy.cli.verbs import (
    Verbs,
    add_unparsed_verb,
    add_workspace_options,
    fail,
    from_options,
    print_text,
    split_command,
    word_parser,
    workspace_of,
)
from azureml_strategy.command_line import is_override

if TYPE_CHECKING:
    from azureml_strategy.jobs.hyperparameters import Sweep
    from azureml_strategy.jobs.plan import JobPlan
    from azureml_strategy.jobs.program import ProgramData

# Verbs that a job may run.
_VERBS = ("bench", "doctor")
_USAGE = """\
azureml-strategy submit SCRIPT.py [KEY=VALUE ...] [options] [-- ARGUMENT ...]
       azureml-strategy submit --command 'torchrun ... train.py' [KEY=VALUE ...] [options]
       azureml-strategy submit RECIPE [KEY=VALUE ...] [options]"""
_DESCRIPTION = """\
Submit a job in Azure ML: a script with its arguments, a command, or a recipe, on the nodes of `cluster`."""
_EPILOG = """\
examples:
  azureml-strategy submit train.py cluster=nd96isr_h100_v5 cluster.num_nodes=2 -- --lr 0.1
  azureml-strategy submit train.py cluster=nc24ads_a100_v4 --input images=azureml:imagenet@latest \\
      -- --data '${{inputs.images}}'                    # in single quotes: the shell here must not read it
  azureml-strategy submit --module mypackage.train cluster=nc24ads_a100_v4 cluster.tier=low_priority --follow
  azureml-strategy submit train.py cluster=nc24ads_a100_v4 --metric val/loss --goal minimize --trials 20 \\
      --sweep 'lr=loguniform(1e-4, 1e-1)' --sweep 'optimizer=choice(adam, sgd)' --stop bandit
  azureml-strategy submit resnet50_imagenet cluster=nd96amsr_a100_v4 cluster.num_nodes=4 --dry-run
  azureml-strategy submit bench cluster=nd96isr_h100_v5 cluster.num_nodes=2 -- --pairs
`bench` and `doctor` run these verbs on the nodes. Settings of `cluster` and `job`: docs/submit.md.
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    add_unparsed_verb(
        verbs, "submit", _run, "submit a script, a command or a recipe as a job in Azure ML", _DESCRIPTION
    )


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the verb's words before `--`."""
    parser = word_parser("submit", usage=_USAGE, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("program", nargs="?", metavar="SCRIPT|RECIPE", help="a script, a recipe, bench or doctor")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of `cluster`, `job`; of a recipe, any")
    parser.add_argument("--command", metavar="TEXT", help="in place of a script: a command line for the job's shell")
    parser.add_argument("--module", metavar="NAME", help="in place of a script: a module, as for python -m")
    parser.add_argument("--dry-run", action="store_true", help="print the job as YAML; needs no account and no network")
    parser.add_argument("--check", action="store_true", help="ask Azure whether the job could start, and send nothing")
    parser.add_argument("--follow", action="store_true", help="print its log until it is over, and how fast it was")
    parser.add_argument("--name", help="name of the job; submitting the same name again starts no second one")
    data = parser.add_argument_group("data of a script or command", "a recipe's are its own `job.inputs`")
    data.add_argument(
        "--input",
        metavar="NAME=PATH",
        action="append",
        default=[],
        help="a data asset, an address, a folder or file here, or a value",
    )
    data.add_argument(
        "--output",
        metavar="NAME[=PATH]",
        action="append",
        default=[],
        help="a folder in storage; without PATH one of the job's own",
    )
    sweep = parser.add_argument_group("a sweep, which starts many such jobs", "docs/sweeps.md")
    sweep.add_argument("--sweep", metavar="KEY=RANGE", action="append", default=[], help="lr=loguniform(1e-4, 1e-1)")
    sweep.add_argument("--sampling", default="random", metavar="HOW", help="random (default), grid or bayesian")
    sweep.add_argument("--stop", metavar="POLICY", help="end trials that lag: bandit, median or truncation")
    sweep.add_argument("--metric", metavar="NAME", help="what is to be the best (a recipe: what it monitors)")
    sweep.add_argument("--goal", metavar="GOAL", help="minimize or maximize")
    sweep.add_argument("--trials", type=int, metavar="N", help="trials in all (default 20; a grid: all)")
    sweep.add_argument("--concurrent", type=int, default=4, metavar="N", help="trials at a time (default 4)")
    add_workspace_options(parser)
    return parser


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.client import import_azure
    from azureml_strategy.jobs.service_errors import JobError

    words, arguments = split_command(options.words)
    parsed = make_parser().parse_intermixed_args(words)
    try:
        import_azure("azure.ai.ml")  # before Hydra, which the extra `azure` brings as well
        plan = _plan(parsed, arguments)
        if parsed.dry_run:
            return _print_job(plan, parsed.name)
        return _check(plan, parsed) if parsed.check else _submit(plan, parsed)
    except JobError as error:
        return fail(error)


def _plan(options: argparse.Namespace, arguments: list[str] | None) -> JobPlan:
    """Plan what the words ask for.

    Raises:
        JobError: the words name nothing to run, or two things, or one of them is invalid.
    """
    from azureml_strategy.jobs.program import Program, plan_program
    from azureml_strategy.jobs.recipe import plan_recipe
    from azureml_strategy.jobs.service_errors import JobError

    program, overrides = options.program, list(options.overrides)
    if program is not None and is_override(program) and (options.command or options.module):
        program, overrides = None, [program, *overrides]
    if sum(each is not None for each in (program, options.command, options.module)) != 1:
        raise JobError(
            "Name one thing to run: a script (submit train.py), a module (--module NAME), a command (--command TEXT) "
            "or a recipe (`azureml-strategy recipes` lists them). The arguments of a script stand after `--`."
        )
    sweep = _sweep(options)
    if program is not None and not program.endswith(".py") and program not in _VERBS:
        given = {"arguments after --": arguments, "--input": options.input, "--output": options.output}
        wrong = [name for name, value in given.items() if value]
        if wrong:
            raise JobError(
                f"{program} is a recipe, and {wrong[0]} belong to a script. A recipe takes KEY=VALUE, and its data as "
                "`job.inputs`."
            )
        return plan_recipe(program, overrides, sweep)
    if options.command is not None and arguments:
        raise JobError("--command is the whole command line. Write the arguments into it.")
    if program in _VERBS and sweep is not None:
        raise JobError(f"`{program}` has nothing to sweep. Leave --sweep out.")
    kind = "verb" if program in _VERBS else "script"
    chosen = from_options(Program, options, arguments=tuple(arguments or ()), **{kind: program})
    return plan_program(chosen, overrides, _data(options), sweep)


def _data(options: argparse.Namespace) -> ProgramData:
    from azureml_strategy.jobs.program import ProgramData
    from azureml_strategy.jobs.service_errors import JobError

    inputs = {}
    for given in options.input:
        name, _, value = given.partition("=")
        if not (name and value):
            raise JobError(
                f"--input {given} names no data. Write --input NAME=PATH, as images=azureml:imagenet@latest."
            )
        inputs[name] = value
    outputs = {name: path or None for name, _, path in (given.partition("=") for given in options.output)}
    return ProgramData(inputs, outputs)


def _sweep(options: argparse.Namespace) -> Sweep | None:
    from azureml_strategy.jobs.hyperparameters import Sweep, parse_parameter
    from azureml_strategy.jobs.service_errors import JobError

    if not options.sweep:
        alone = {"--stop": options.stop, "--metric": options.metric, "--goal": options.goal, "--trials": options.trials}
        for option, value in alone.items():
            if value is not None:
                raise JobError(f"{option} is about a sweep. Say what is varied: --sweep 'lr=uniform(0.01, 0.1)'.")
        return None
    return from_options(Sweep, options, parameters=tuple(map(parse_parameter, options.sweep)))


def _print_job(plan: JobPlan, name: str | None) -> int:
    from azureml_strategy.jobs.render import render_offline
    from azureml_strategy.jobs.submit import summarize

    job, price, text = render_offline(plan, name)
    snapshot = plan.snapshot()
    for note in plan.notes:
        _print_note(note)
    if snapshot is not None:
        _print_note(snapshot.report())
    for line in summarize(plan, job, price):
        _print_note(line)
    print_text(text.rstrip())
    return 0


def _check(plan: JobPlan, options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.check import check_submission

    fits = True
    for finding in check_submission(plan, workspace_of(options)):
        print_text(str(finding))
        fits = fits and finding.fits is not False
    print_text("Nothing was sent." if fits else "Nothing was sent. The job could not start: see NO above.")
    return 0 if fits else 1


def _submit(plan: JobPlan, options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.follow import follow_job
    from azureml_strategy.jobs.submit import submit_plan

    job = submit_plan(plan, workspace=workspace_of(options), name=options.name, tell=_print_note)
    print_text(f"{job.name}\n{job.studio_url}")
    return 1 if options.follow and follow_job(job) != "Completed" else 0


def _print_note(line: str) -> None:
    """Print to standard error, so that standard output stays pure YAML, or a name and an address."""
    print(line, file=sys.stderr)
