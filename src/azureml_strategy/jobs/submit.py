"""Submits a recipe, a script or a command as an Azure ML job, exactly once even if the connection fails.

Before that it says what is uploaded, what the job costs and which names must exist.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from typing_extensions import Unpack

from azureml_strategy.cluster.job import Price
from azureml_strategy.jobs.client import WorkspaceSettings, connect
from azureml_strategy.jobs.expected import add_expectation
from azureml_strategy.jobs.follow import SubmittedJob
from azureml_strategy.jobs.hyperparameters import Sweep, build_sweep
from azureml_strategy.jobs.inputs import asset_of, check_data
from azureml_strategy.jobs.plan import JobPlan
from azureml_strategy.jobs.prices import add_price
from azureml_strategy.jobs.program import Program, plan_call
from azureml_strategy.jobs.recipe import plan_recipe
from azureml_strategy.jobs.render import build_job
from azureml_strategy.jobs.resources import scale_up_advice
from azureml_strategy.jobs.service_errors import UNREADABLE, ServiceError, service_errors
from azureml_strategy.jobs.settings import ClusterSettings
from azureml_strategy.jobs.snapshot import Snapshot, describe_files, upload_snapshot

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Command, Job
    from azure.ai.ml.sweep import SweepJob

log = logging.getLogger(__name__)

__all__ = [
    "Submission",
    "SubmittedJob",
    "new_job_name",
    "submit_command",
    "submit_plan",
    "submit_recipe",
    "submit_script",
]


def summarize(plan: JobPlan, job: Command, price: Price | None) -> Iterator[str]:
    """Yield a line each about uploads beside the code, the price of a node, names that must exist and larger nodes."""
    build = getattr(job.environment, "build", None)
    if build is not None and build.path:
        # A user's own folder of a build is named by the line about the environment.
        yield f"image: built by Azure ML from {_describe(Path(build.path))}, unless the workspace has it already"
    for name, each in plan.job.inputs.items():
        if each.path and Path(each.path).exists():
            yield f"input {name}: {os.path.relpath(each.path)}, {_describe(Path(each.path))}"
    if price is not None:
        nodes = plan.cluster.num_nodes
        total = f", {nodes * price.per_hour:,.10g} {price.currency}/h for {nodes} nodes" if nodes > 1 else ""
        yield f"price: a node {price}{total}"
    names = [f"compute {str(job.compute).removeprefix('azureml:')}"] if job.compute else []
    names += [f"data {each.path}" for each in plan.job.inputs.values() if asset_of(each) is not None]
    names += [f"environment {job.environment}"] if isinstance(job.environment, str) else []
    if names:
        yield f"the workspace must have: {', '.join(names)} (azureml-strategy submit ... --check asks)"
    advice = scale_up_advice(plan.size, plan.cluster.num_nodes) if plan.expect and plan.size else None
    if advice is not None:
        yield advice


def _describe(path: Path) -> str:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return describe_files(len(files), sum(each.stat().st_size for each in files))


class Submission(TypedDict, total=False):
    """How a job is submitted; every key may be left out.

    Attributes:
        client: client of the workspace; by default made from `workspace`, `job.workspace` and this machine's
            configuration.
        workspace: settings that take precedence over `job.workspace`; used only without a client.
        name: name of the job; by default made from the recipe's or program's name.
        tell: receives each line about what was chosen and uploaded. By default only a line that deserves a warning is
            logged.
    """

    client: MLClient | None
    workspace: WorkspaceSettings | None
    name: str | None
    tell: Callable[[str], object] | None


def submit_recipe(
    recipe: str, overrides: Sequence[str], *, sweep: Sweep | None = None, **how: Unpack[Submission]
) -> SubmittedJob:
    """Submit a recipe as a job.

    Args:
        recipe: the name of a shipped recipe, or the path of a YAML file.
        overrides: overrides of one run, in Hydra's notation.
        sweep: a search over keys of the recipe, whose trials are such jobs.
        how: client, workspace, name and tell; see `Submission`.

    Raises:
        JobError: the recipe, an override, the cluster or the job is invalid. Nothing was sent.
        ServiceError: Azure refused, or could not be reached.
        KeyboardInterrupt: the user interrupted. The message names the job if it may have been created.
    """
    return submit_plan(plan_recipe(recipe, overrides, sweep), **how)


def submit_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    cluster: str | None = None,
    num_nodes: int | None = None,
    overrides: Sequence[str] = (),
    inputs: Mapping[str, str | float] | None = None,
    outputs: Mapping[str, str | None] | None = None,
    sweep: Sweep | None = None,
    **how: Unpack[Submission],
) -> SubmittedJob:
    """Submit a Python script of the user's as a job.

    Args:
        script: path of the script.
        arguments: its arguments, each passed on exactly. `${{inputs.NAME}}` stands for the path of an input.
        cluster: a size, as for `cluster=` on the command line: `nd96isr_h100_v5`.
        num_nodes: nodes of the job.
        overrides: further settings of `cluster` and `job`, in Hydra's notation.
        inputs: path or value of each input, as for `--input`.
        outputs: address of each output; None for a folder of the job's own.
        sweep: a search over options of the script, whose trials are such jobs.
        how: client, workspace, name and tell; see `Submission`.

    Raises:
        JobError, ServiceError, KeyboardInterrupt: as for `submit_recipe`.
    """
    program = Program(script=script, arguments=tuple(arguments))
    return submit_plan(plan_call(program, cluster, num_nodes, overrides, inputs, outputs, sweep), **how)


def submit_command(
    command: str,
    *,
    cluster: str | None = None,
    num_nodes: int | None = None,
    overrides: Sequence[str] = (),
    inputs: Mapping[str, str | float] | None = None,
    outputs: Mapping[str, str | None] | None = None,
    sweep: Sweep | None = None,
    **how: Unpack[Submission],
) -> SubmittedJob:
    """Submit a command for the shell of a job, such as `torchrun ... train.py`, which is passed on as it is.

    Args:
        command: the command line.
        cluster, num_nodes, overrides, inputs, outputs, sweep, how: as for `submit_script`.

    Raises:
        JobError, ServiceError, KeyboardInterrupt: as for `submit_recipe`.
    """
    program = Program(command=command)
    return submit_plan(plan_call(program, cluster, num_nodes, overrides, inputs, outputs, sweep), **how)


def submit_plan(plan: JobPlan, **how: Unpack[Submission]) -> SubmittedJob:
    """Submit what is planned; `how` is a `Submission`.

    The job has its name before the first request. So a repeated request finds the existing job, whether azure-core
    repeats it after a lost answer or the caller submits the same name again.

    Raises:
        JobError, ServiceError, KeyboardInterrupt: as for `submit_recipe`.
    """
    client, tell = how.get("client"), how.get("tell")
    job = build_job(plan, how.get("name") or new_job_name(plan.name))
    if plan.sweep is not None:
        build_sweep(job, plan.sweep)  # what is wrong with it is known before anything is sent
    snapshot = plan.snapshot()
    if tell is not None:
        for note in plan.notes:
            tell(note)
    if snapshot is not None:
        _report_upload(snapshot, tell)
    if client is None:
        client = connect((how.get("workspace") or WorkspaceSettings()).over(plan.job.workspace))
    check_data(plan.job.inputs, client)
    price = None if plan.job.plain else add_price(plan, job, _region(plan.cluster, client), offline=False)
    add_expectation(plan, job)
    if tell is not None:
        for line in summarize(plan, job, price):
            tell(line)
    if snapshot is not None:
        with service_errors():
            job.code = upload_snapshot(client, snapshot.folder)
    created = _create(client, build_sweep(job, plan.sweep) if plan.sweep else job)
    return SubmittedJob(client, str(created.name), str(created.studio_url))


def _report_upload(snapshot: Snapshot, tell: Callable[[str], object] | None) -> None:
    if tell is not None:
        tell(snapshot.report())
    elif snapshot.advice() or snapshot.secrets:
        log.warning("%s", snapshot.report())


def _create(client: MLClient, job: Command | SweepJob) -> Job:
    from azure.core.exceptions import ServiceRequestError, ServiceResponseError

    unknown = (
        f"Whether job {job.name} was made is not known. The same command with --name {job.name} takes it up, or makes "
        "it."
    )
    try:
        with service_errors():
            created: Job = client.jobs.create_or_update(job)
        if created.name != job.name:  # for example an empty object
            raise ServiceError("Azure's answer is none about the job.", code=UNREADABLE)
        return created
    except ServiceError as error:
        # The service may have carried out the request although its answer is an error or was lost.
        lost = isinstance(error.__cause__, (ServiceRequestError, ServiceResponseError))
        if not (lost or error.code == UNREADABLE or (error.status is not None and error.status >= 500)):
            raise
        raise ServiceError(f"{error} {unknown}", code=error.code, status=error.status) from error
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"Interrupted. {unknown}") from interrupt


def new_job_name(name: str) -> str:
    """Make a unique job name from that of the recipe or program, the time (UTC) and random digits."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", name).lstrip("_-") or "job"
    now = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    return f"{stem}_{now}_{secrets.token_hex(3)}"


def _region(cluster: ClusterSettings, client: MLClient) -> str | None:
    """The region of the nodes, for their price. Ask Azure only if the settings give neither region nor price."""
    if cluster.region or cluster.price_per_hour is not None or cluster.vm_size is None:
        return cluster.region
    with service_errors():
        workspace = client.workspaces.get(client.workspace_name)
    return workspace.location if workspace else None
