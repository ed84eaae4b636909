"""Lists, shows, cancels and downloads jobs, and reads their logs from the workspace's run history, their metrics
from MLflow.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from azureml_strategy.cluster.redaction import REDACTED, redact_text
from azureml_strategy.jobs.azure_internals import run_details_of
from azureml_strategy.jobs.client import plain
from azureml_strategy.jobs.service_errors import JobError, service_errors
from azureml_strategy.tracking.run import describe_store

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

# The output of a job's processes: one file per process, or one file for all. The first process is the one that reports.
_PRINTED = re.compile(r"user_logs/std_log(?:_process_(\d+))?\.txt")
# azure.ai.ml.operations._run_history_constants.RunHistoryConstants.TERMINAL_STATUSES without Paused and NotResponding,
# from which a job can come back.
FINAL = ("Completed", "Failed", "Canceled")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@service_errors()
def log_files(client: MLClient, name: str) -> dict[str, str]:
    """The addresses of the logs that a job has so far, by name, such as `user_logs/std_log.txt`.

    The addresses contain a signature. Do not show them.
    """
    return dict(sorted((run_details_of(client, name).log_files or {}).items()))


def printed_log(names: list[str]) -> str | None:
    """The log with the output of the job's first process; None if there is none yet."""
    found = {int(match[1] or 0): name for name in names if (match := _PRINTED.fullmatch(name))}
    return found[min(found)] if found else None


def read_log(client: MLClient, name: str, file: str | None = None) -> str:
    """Read a log of a job; without the name of a log, the output of its first process.

    Raises:
        JobError: there is no such log, or none yet.
        ServiceError: there is no such job, or storage cannot be read.
    """
    from azure.storage.blob import BlobClient

    files = log_files(client, name)
    chosen = file or printed_log(list(files))
    if chosen not in files:
        known = (
            f"It has: {', '.join(files)}." if files else "It has none yet; it is waiting for its nodes, or its image."
        )
        raise JobError(f"{name} has no log {chosen or 'of its processes'}. {known}")
    with service_errors():
        content = BlobClient.from_blob_url(files[chosen]).download_blob().readall()
    return bytes(content).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class JobSummary:
    """One job.

    Attributes:
        status: Azure ML's word for the state of the job.
        created: time of creation in UTC, to the second.
        compute: name of the cluster. On serverless compute the VM size, or None if Azure ML chooses it.
        studio_url: the job's page in Azure ML Studio.
        outputs: names of the job's outputs.
    """

    name: str
    status: str
    experiment: str | None
    display_name: str | None
    created: str | None
    compute: str | None
    nodes: int | None
    studio_url: str | None
    tags: dict[str, str]
    outputs: tuple[str, ...]

    @property
    def final(self) -> bool:
        """Whether the job is over."""
        return self.status in FINAL


def list_jobs(
    client: MLClient, limit: int, experiment: str | None = None, status: str | None = None
) -> list[JobSummary]:
    """List the newest jobs, at most as many as the limit; only those of an experiment or in a state (in any case).

    Raises:
        JobError: the limit is below 1.
    """
    if limit < 1:
        raise JobError(f"--limit {limit} lists no job. Give 1 or more.")
    with service_errors():
        summaries = (_summary(job) for job in client.jobs.list() if job is not None)
        fitting = (
            each
            for each in summaries
            if experiment in (None, each.experiment) and (status is None or status.lower() == each.status.lower())
        )
        return list(islice(fitting, limit))


@service_errors()
def show_job(client: MLClient, name: str) -> JobSummary:
    """Look up one job.

    Raises:
        ServiceError: there is no job of this name.
    """
    return _summary(client.jobs.get(name))


@service_errors()
def job_failure(client: MLClient, name: str) -> str | None:
    """Why a job failed, without secrets; None if Azure ML gives no reason."""
    error = getattr(run_details_of(client, name).error, "error", None)
    return redact_text(f"{error.code}: {error.message}") if error else None


def cancel_job(client: MLClient, name: str) -> JobSummary:
    """Cancel a job and wait until Azure ML has accepted that.

    Raises:
        JobError: the job is already over.
        ServiceError: there is no job of this name, or you may not cancel it.
    """
    job = show_job(client, name)
    if job.final:
        raise JobError(f"{name} is {job.status} already, so that there is nothing to cancel.")
    with service_errors():
        client.jobs.begin_cancel(name).result()
    return show_job(client, name)


def download_job(
    client: MLClient, name: str, folder: Path, output: str | None = None, *, everything: bool = False
) -> None:
    """Download the logs and outputs of a finished job.

    Args:
        client, name: the workspace and the job.
        folder: target folder. Logs and `./outputs` go to its `artifacts/`, each output to its `named-outputs/NAME/`.
        output: download only this output, such as `run`. None downloads the logs and `./outputs`.
        everything: download the logs, `./outputs` and every output.

    Raises:
        JobError: the job is not over, or has no such output.
        ServiceError: there is no job of this name, or storage cannot be read.
    """
    job = show_job(client, name)
    if not job.final:
        raise JobError(
            f"{name} is {job.status}: outputs can be fetched when it is over. For its log now: jobs logs {name}."
        )
    if output is not None and output not in job.outputs:
        raise JobError(f"{name} has no output {output!r}. It has: {', '.join(job.outputs)}.")
    with service_errors():
        client.jobs.download(name, download_path=folder, output_name=output, all=everything)


def _summary(job: Any) -> JobSummary:
    created = getattr(job.creation_context, "created_at", None)
    resources = getattr(job, "resources", None)
    # `compute` is the resource id of a cluster. A serverless job has none.
    compute = getattr(job, "compute", None) or getattr(resources, "instance_type", None)
    return JobSummary(
        name=job.name,
        status=plain(job.status),
        experiment=job.experiment_name,
        display_name=job.display_name,
        created=f"{created:%Y-%m-%d %H:%M:%S}" if created else None,
        compute=compute.rpartition("/")[2] if isinstance(compute, str) else None,
        nodes=getattr(resources, "instance_count", None) or 1,
        studio_url=job.studio_url,
        tags=dict(job.tags or {}),
        outputs=tuple(getattr(job, "outputs", None) or ()),
    )


def tracking_uri(client: MLClient) -> str:
    """The address where MLflow finds the runs of a workspace: `azureml://...`. MLflow needs azureml-mlflow for it.

    Raises:
        ServiceError: Azure did not answer.
    """
    logging.getLogger("azureml").setLevel(logging.WARNING)  # azureml-mlflow logs the source of each setting
    with service_errors():
        workspace = client.workspaces.get(client.workspace_name)
    assert workspace is not None, "a workspace that is not there raises"
    return str(workspace.mlflow_tracking_uri)


def run_metrics(uri: str, run_id: str) -> dict[str, float]:
    """The last value of each metric of a run in the MLflow store of an address, such as `tracking_uri` gives.

    Raises:
        mlflow.exceptions.MlflowException: there is no such run, or the service does not answer.
    """
    from mlflow import MlflowClient

    return dict(MlflowClient(uri).get_run(run_id).data.metrics)


def store_address(store: str, client: Callable[[], MLClient]) -> str:
    """Find the store that a file names. No token goes to a host that only the file names.

    Args:
        store: address from `describe_store`. It must be that of MLFLOW_TRACKING_URI or of the workspace, or a store on
            this machine.
        client: returns the client of the workspace; called only if the store is a workspace's.

    Raises:
        ValueError: the address is none of these.
        ServiceError: Azure did not answer.
    """
    configured = os.environ.get("MLFLOW_TRACKING_URI", "")
    if configured and describe_store(configured) == store:
        return configured
    if store.startswith("azureml:"):
        found = tracking_uri(client())
        if _workspace(store) in (_workspace(found), _workspace(describe_store(found))):
            return found
        raise ValueError(
            f"The file names the store {store}, and the workspace's is {describe_store(found)}. If the file is yours, "
            "name its workspace by the options of this command, or the store: --tracking-uri URI."
        )
    if REDACTED not in store and _is_here(store):
        return store
    raise ValueError(
        f"The file names the store {store or 'nowhere'}, which is neither on this machine without a sign-in nor that "
        "of MLFLOW_TRACKING_URI. Metrics and a token would go to whomever the file names. If it is right, type it: "
        "--tracking-uri URI."
    )


def _workspace(uri: str) -> str:
    """The part of an address that identifies a workspace. The host and the version before it may differ."""
    path = unquote(urlsplit(uri).path).lower().rstrip("/")
    return path[max(0, path.find("/subscriptions/")) :]


def _is_here(store: str) -> bool:
    """Whether a store is a file, or a server of this machine for which nobody signs in."""
    from mlflow.environment_variables import MLFLOW_TRACKING_AUTH, MLFLOW_TRACKING_AWS_SIGV4, MLFLOW_TRACKING_TOKEN
    from mlflow.utils.credentials import read_mlflow_creds

    address = urlsplit(store)
    if address.scheme in ("sqlite", "file", ""):
        return bool(address.path) and not address.netloc
    kinds: Iterable[Any] = (MLFLOW_TRACKING_TOKEN, MLFLOW_TRACKING_AUTH, MLFLOW_TRACKING_AWS_SIGV4)
    signs_in = any((*read_mlflow_creds(), *(each.get() for each in kinds)))
    return address.scheme in ("http", "https") and address.hostname in _LOOPBACK and not signs_in
