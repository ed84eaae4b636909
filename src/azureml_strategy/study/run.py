"""Runs a study here or as jobs, or reads existing runs, and compares what they measured."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from azureml_strategy.emulator import EmulatedJob, EmulationError, emulate_run, enough_gpus, error_sentence
from azureml_strategy.files import write_atomically
from azureml_strategy.jobs import JobError
from azureml_strategy.lazy import require_library
from azureml_strategy.study.options import StudyError, StudyOptions, headings, run_overrides
from azureml_strategy.study.report import plot, print_study
from azureml_strategy.study.scaling import Figures, Scaling, compare, read_figures
from azureml_strategy.tracking.run import resolve_tracking_uri
from azureml_strategy.training.checks import check_overrides
from azureml_strategy.training.recipes import RecipeError, find_recipe
from azureml_strategy.training.resolvers import register_resolvers

if TYPE_CHECKING:
    from azureml_strategy.jobs import SubmittedJob
    from azureml_strategy.jobs.plan import JobPlan

WORKSPACE = "azureml"

# Exit codes of a process that Ctrl-C or SIGTERM ended, as a shell reports them: 128 + the signal.
_INTERRUPTED = (130, 143)
# The error of a failed job is looked for in so many lines at the end of its log.
_LAST_LINES = 100


def read_runs(options: StudyOptions) -> Iterator[Figures]:
    """Read the runs that the user named.

    Raises:
        StudyError: the store has no such run, or does not answer.
        JobError: no workspace is configured.
        TrackingError: azureml-mlflow is missing.
    """
    from mlflow.tracking import MlflowClient

    store = options.store
    if store == WORKSPACE:
        from azureml_strategy.jobs import connect
        from azureml_strategy.jobs.listing import tracking_uri

        store = tracking_uri(connect())
    client = MlflowClient(resolve_tracking_uri(store))
    for run_id in options.runs:
        yield read_figures(client, run_id)


def emulate_sizes(options: StudyOptions) -> Iterator[Figures]:
    """Emulate a job of each size, from small to large. After a size that fails, the study continues with the next one.

    Raises:
        StudyError: the recipe or an override is misspelt, or nothing can be emulated here.
        KeyboardInterrupt: the user, or SIGTERM, ended a job.
    """
    command = ["env", f"OMP_NUM_THREADS={threads_per_process(options)}", *(options.command or _train_command(options))]
    processes = options.processes_per_node or 1
    # If some sizes ran on GPUs and others did not, the study would compare devices and not sizes.
    gpus = None if enough_gpus(max(options.nodes), processes) else 0
    for nodes, heading in headings(options):
        print(f"\n{heading}", flush=True)
        yield _emulate(EmulatedJob(command, nodes, processes, gpus_per_node=gpus))


def _train_command(options: StudyOptions) -> list[str]:
    overrides = run_overrides(options)
    register_resolvers()
    try:
        check_overrides(find_recipe(str(options.recipe)), overrides)
    except RecipeError as error:
        raise StudyError(str(error)) from error
    return ["azureml-strategy", "train", str(options.recipe), *overrides]


def threads_per_process(options: StudyOptions) -> str:
    """The number of compute threads of a process, the same at every size.

    Otherwise each process of a small job would have more cores of this machine than one of a large job. The study would
    show that, and not what the processes cost one another.
    """
    processes = max(options.nodes) * (options.processes_per_node or 1)
    return os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // processes, 1))


def _emulate(job: EmulatedJob) -> Figures:
    from mlflow.tracking import MlflowClient

    try:
        emulated = emulate_run(job)
    except EmulationError as error:
        raise StudyError(str(error)) from error
    if emulated.exit_code in _INTERRUPTED:
        raise KeyboardInterrupt
    figures = read_figures(MlflowClient(emulated.run.tracking_uri), emulated.run.run_id, job.nodes)
    return replace(figures, error=emulated.error)


def submit_sizes(options: StudyOptions) -> Iterator[Figures]:
    """Submit a job of each size, and only then wait for each and read its run.

    Raises:
        JobError: a job cannot be made as requested, or Azure refused it or no longer answers.
        StudyError: the store has no such run, or does not answer.
        TrackingError: azureml-mlflow is missing.
    """
    from mlflow.tracking import MlflowClient

    from azureml_strategy.jobs import connect  # needs the extra `azure`
    from azureml_strategy.jobs.listing import tracking_uri
    from azureml_strategy.jobs.render import build_offline
    from azureml_strategy.jobs.submit import submit_plan

    plans, jobs = {nodes: _plan(options, nodes) for nodes in options.nodes}, {}
    for plan in plans.values():
        build_offline(plan)  # check that all are valid before one is paid for
    client = connect(plans[min(plans)].job.workspace)
    store = resolve_tracking_uri(tracking_uri(client))
    for nodes, heading in headings(options):
        jobs[nodes] = submit_plan(plans[nodes], client=client)
        print(f"{heading}: job {jobs[nodes].name}, {jobs[nodes].studio_url}", flush=True)
    names = ",".join(job.name for job in jobs.values())
    print(
        f"They go on without this command. Their table later: azureml-strategy study --runs {names} --store azureml",
        flush=True,
    )
    for nodes, job in jobs.items():
        status = job.wait()
        error = _failure_of(job) if status == "Failed" else ""
        print(f"{job.name}: {status}{f'. {error}' if error else ''}", flush=True)
        yield replace(read_figures(MlflowClient(store), job.run_id, nodes), error=error)


def _failure_of(job: SubmittedJob) -> str:
    """Say why a job failed: by the end of its first process's log, else by Azure ML's own words."""
    from azureml_strategy.jobs.listing import job_failure

    try:
        return error_sentence(job.logs().splitlines()[-_LAST_LINES:])
    except JobError:  # it has no log, for example since its image could not be built; or storage does not answer
        pass
    try:
        return " ".join((job_failure(job.client, job.name) or "").split())
    except JobError:
        return ""


def _plan(options: StudyOptions, nodes: int) -> JobPlan:
    """Plan the job of one size.

    Raises:
        JobError: the recipe, the command or a setting is invalid.
    """
    from azureml_strategy.jobs.program import plan_program, program_of
    from azureml_strategy.jobs.recipe import plan_recipe

    given = [each for each in options.overrides if each.lstrip("+~").startswith("cluster.num_nodes=")]
    if given:
        raise JobError(f"{given[0]} is one size, and --nodes names them all. Leave the override out.")
    overrides = [*run_overrides(options), f"cluster.num_nodes={nodes}"]
    if options.processes_per_node is not None:
        overrides.append(f"cluster.processes_per_node={options.processes_per_node}")
    if options.command:
        return plan_program(program_of(options.command), overrides)
    return plan_recipe(str(options.recipe), overrides)


def run_study(options: StudyOptions) -> int:
    """Start the runs or read them, then print, plot and write what they achieved.

    Returns:
        The exit code: 0, 1 if a run failed or measured nothing, 130 if the user ended the study. Even then it shows
            what was measured so far.

    Raises:
        StudyError: the study cannot be made as requested.
        JobError: Azure ML cannot do what is requested, or did not answer.
        TrackingError: the tracking store cannot be used.
    """
    require_library("matplotlib")
    figures: list[Figures] = []
    try:
        for each in _runs(options):
            figures.append(each.priced(options.price))
    except KeyboardInterrupt:
        if figures:
            _report(compare([*figures, *_unmeasured(options, len(figures))]), options)
        return 130
    scaling = compare(figures)
    _report(scaling, options)
    return 0 if scaling.complete else 1


def _unmeasured(options: StudyOptions, read: int) -> list[Figures]:
    """The sizes or runs that come after the first `read` ones."""
    problem = "not read: the study was ended before"
    if options.runs:
        return [Figures(run_id=run_id, problem=problem) for run_id in options.runs[read:]]
    return [Figures(nodes=nodes, problem=problem) for nodes in sorted(options.nodes)[read:]]


def _report(scaling: Scaling, options: StudyOptions) -> None:
    write_atomically(options.output, to_json(scaling).encode())
    title = options.recipe or shlex.join(options.command) or "scaling study"
    notes = [note for note in ("emulated" if scaling.emulated else "", scaling.measured) if note]
    write_atomically(options.plot, plot(scaling, f"{title} ({', '.join(notes)})" if notes else title))
    print_study(scaling, options, [options.output, options.plot])


def to_json(scaling: Scaling) -> str:
    """Everything except the runs' configurations, as JSON."""
    rows = [
        {
            **{name: value for name, value in asdict(row.figures).items() if name != "params"},
            "samples_per_second_per_device": row.figures.per_device,
            "prediction_error": row.figures.prediction_error,
            "speed_up": row.speed_up,
            "efficiency": row.efficiency,
        }
        for row in scaling.rows
    ]
    base = scaling.base.run_id if scaling.base else None
    return json.dumps({"base": base, "runs": rows, "differences": scaling.differences}, indent=2)


def _runs(options: StudyOptions) -> Iterator[Figures]:
    if options.runs:
        return read_runs(options)
    if options.local:
        return emulate_sizes(options)
    return submit_sizes(options)
