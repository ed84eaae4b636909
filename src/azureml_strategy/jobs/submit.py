"""Submits a recipe as an Azure ML job, exactly once even if the connection fails."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from azureml_strategy.jobs.client import WorkspaceSettings, connect
from azureml_strategy.jobs.follow import SubmittedJob
from azureml_strategy.jobs.inputs import check_data
from azureml_strategy.jobs.recipe import JobRecipe, read_recipe
from azureml_strategy.jobs.render import build_job, code_folder, node_price, recipe_in_code
from azureml_strategy.jobs.service_errors import UNREADABLE, JobError, ServiceError, service_errors
from azureml_strategy.jobs.snapshot import Snapshot, list_snapshot, upload_snapshot

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Command, Job

__all__ = ["SubmittedJob", "check_snapshot", "new_job_name", "submit_recipe"]

log = logging.getLogger(__name__)


def submit_recipe(
    recipe: str,
    overrides: Sequence[str],
    *,
    client: MLClient | None = None,
    workspace: WorkspaceSettings | None = None,
    name: str | None = None,
    tell: Callable[[str], object] | None = None,
) -> SubmittedJob:
    """Submit a recipe as a job.

    The job has its name before the first request. A repeated request finds the existing job, whether azure-core repeats
    it after a lost answer or the caller submits the same name again.

    Args:
        recipe: the name of a shipped recipe, or the path of a YAML file.
        overrides: overrides of one run, in Hydra's notation.
        client: client of the workspace; by default made from `workspace`, `job.workspace` and this machine's
            configuration.
        workspace: settings that take precedence over `job.workspace`; used only without a client.
        name: name of the job; by default made from the recipe's name.
        tell: receives one line about the uploaded code. By default the line is logged if it deserves a warning.

    Raises:
        JobError: the recipe, an override, the cluster or the job is invalid. Nothing was sent.
        ServiceError: Azure refused, or could not be reached.
        KeyboardInterrupt: the user interrupted. The message names the job if it may have been created.
    """
    found = read_recipe(recipe, overrides)
    job = build_job(found, name or new_job_name(found.recipe.name), None)
    snapshot = check_snapshot(found)
    if snapshot is not None:
        _tell(snapshot, tell)
    if client is None:
        client = connect((workspace or WorkspaceSettings()).over(found.job.workspace.settings()))
    check_data(found.job.inputs, client)
    price = node_price(found, _region(found, client), offline=False)
    if price is not None:
        job.environment_variables = {**price.as_variables(), **job.environment_variables}
    if snapshot is not None:
        with service_errors():
            job.code = upload_snapshot(client, snapshot.folder)
    created = _create(client, job)
    return SubmittedJob(client, str(created.name), str(created.studio_url))


def _tell(snapshot: Snapshot, tell: Callable[[str], object] | None) -> None:
    line = ". ".join(filter(None, [snapshot.describe(), snapshot.advice()]))
    if tell is not None:
        tell(line)
    elif snapshot.advice() or snapshot.secrets:
        log.warning("%s", line)


def _create(client: MLClient, job: Command) -> Job:
    try:
        with service_errors():
            created: Job = client.jobs.create_or_update(job)
        if created.name != job.name:  # for example an empty object
            raise ServiceError("Azure's answer is none about the job.", code=UNREADABLE)
        return created
    except ServiceError as error:
        if not _may_have_been_done(error):
            raise
        raise ServiceError(f"{error} {_unknown(job)}", code=error.code, status=error.status) from error
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"Interrupted. {_unknown(job)}") from interrupt


def _unknown(job: Command) -> str:
    return (
        f"Whether job {job.name} was made is not known. The same command with --name {job.name} takes it up, or makes "
        "it."
    )


def _may_have_been_done(error: ServiceError) -> bool:
    """Whether the service may have carried out the request although its answer is an error or was lost."""
    from azure.core.exceptions import ServiceRequestError, ServiceResponseError

    if error.code == UNREADABLE or isinstance(error.__cause__, (ServiceRequestError, ServiceResponseError)):
        return True
    return error.status is not None and error.status >= 500


def new_job_name(recipe: str) -> str:
    """Make a unique job name from the recipe, the time (UTC) and random digits."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", recipe)
    now = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    return f"{stem}_{now}_{secrets.token_hex(3)}"


def check_snapshot(recipe: JobRecipe) -> Snapshot | None:
    """List the folder of code, and check it, before the upload.

    Returns:
        The files that the job gets; None if it needs no code.

    Raises:
        JobError: the folder is missing, empty or unreadable, or its snapshot lacks the recipe.
    """
    folder = code_folder(recipe)
    if folder is None:
        return None
    snapshot = list_snapshot(folder)
    own = None if recipe.recipe.folder is None else recipe_in_code(recipe).removeprefix("./")
    if own is not None and own not in snapshot.files:
        raise JobError(
            f"The recipe {own} is left out by {folder}/.amlignore or .gitignore, or lies where no code is, and the "
            "job needs it."
        )
    return snapshot


def _region(recipe: JobRecipe, client: MLClient) -> str | None:
    """The region of the nodes, for their price. Ask Azure only if the settings give neither region nor price."""
    if recipe.cluster.region or recipe.cluster.price_per_hour is not None or recipe.cluster.vm_size is None:
        return recipe.cluster.region
    with service_errors():
        workspace = client.workspaces.get(client.workspace_name)
    return workspace.location if workspace else None
