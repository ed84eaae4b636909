"""Runs the sizes of a study as Azure ML jobs. It submits all of them before it waits for the first."""

from __future__ import annotations

from collections.abc import Iterator

from azureml_strategy.jobs import JobError, SubmittedJob, connect, render_job, submit_recipe
from azureml_strategy.jobs.metrics import tracking_uri
from azureml_strategy.jobs.recipe import read_recipe
from azureml_strategy.study.figures import Figures, read_figures
from azureml_strategy.study.options import StudyOptions, headings, run_overrides
from azureml_strategy.tracking.run import resolve_tracking_uri


def submit_sizes(options: StudyOptions) -> Iterator[Figures]:
    """Submit a job of each size, then wait for each and read its run.

    Raises:
        JobError: a job cannot be made as requested, or Azure refused it or no longer answers.
        StudyError: the store has no such run, or does not answer.
        TrackingError: azureml-mlflow is missing.
    """
    from mlflow.tracking import MlflowClient

    recipe, jobs = str(options.recipe), {}
    plans = {nodes: _overrides(options, nodes) for nodes in options.nodes}
    for overrides in plans.values():
        render_job(recipe, overrides)  # check that all are valid before one is paid for
    client = connect(read_recipe(recipe, options.overrides).job.workspace.settings())
    store = resolve_tracking_uri(tracking_uri(client))
    for nodes, heading in headings(options):
        jobs[nodes] = submit_recipe(recipe, plans[nodes], client=client)
        print(f"{heading}: job {jobs[nodes].name}, {jobs[nodes].studio_url}", flush=True)
    print(_how_to_go_on(list(jobs.values())), flush=True)
    for nodes, job in jobs.items():
        print(f"{job.name}: {job.wait()}", flush=True)
        yield read_figures(MlflowClient(store), job.run_id, nodes)


def _overrides(options: StudyOptions, nodes: int) -> list[str]:
    own = [each for each in options.overrides if each.lstrip("+~").startswith("cluster.num_nodes=")]
    if own:
        raise JobError(f"{own[0]} is one size, and --nodes names them all. Leave the override out.")
    size = [f"cluster.num_nodes={nodes}"]
    if options.processes_per_node is not None:
        size.append(f"cluster.processes_per_node={options.processes_per_node}")
    return [*run_overrides(options), *size]


def _how_to_go_on(jobs: list[SubmittedJob]) -> str:
    names = ",".join(job.name for job in jobs)
    return f"They go on without this command. Their table later: azureml-strategy study --runs {names} --store azureml"
