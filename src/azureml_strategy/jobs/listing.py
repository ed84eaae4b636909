"""Jobs as a table, one job in full, and a job's logs from the workspace's run history."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.jobs.client import plain
from azureml_strategy.jobs.service_errors import JobError, service_errors

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

# What the processes of a job print: one file for each, or one for all. The first process is the one that reports.
_PRINTED = re.compile(r"user_logs/std_log(?:_process_(\d+))?\.txt")
# azure.ai.ml.operations._run_history_constants.RunHistoryConstants.TERMINAL_STATUSES, but for Paused and NotResponding,
# from which a job can come back.
FINAL = ("Completed", "Failed", "Canceled")


def run_details(client: MLClient, name: str) -> Any:
    """State, logs and error of a job.

    Returns:
        `azure.ai.ml._restclient.runhistory.models.RunDetails`.

    Raises:
        ServiceError: there is none of this name.
    """
    with service_errors():
        return client.jobs._runs_operations.get_run_details(name)


def log_files(client: MLClient, name: str) -> dict[str, str]:
    """The logs that a job has so far: their addresses by name, such as `user_logs/std_log.txt`.

    The addresses carry a signature, so that they are not to be shown.
    """
    return dict(sorted((run_details(client, name).log_files or {}).items()))


def printed_log(names: list[str]) -> str | None:
    """Which of a job's logs is what its first process has printed; None where it has printed nothing yet."""
    found = {int(match[1] or 0): name for name in names if (match := _PRINTED.fullmatch(name))}
    return found[min(found)] if found else None


def read_log(client: MLClient, name: str, file: str | None = None) -> str:
    """What stands in a log.

    Args:
        client: of the workspace.
        name: of the job.
        file: which log; None: what the first process has printed.

    Raises:
        JobError: there is no such log, or none yet.
        ServiceError: there is no such job, or storage cannot be read.
    """
    from azure.storage.blob import BlobClient

    files = log_files(client, name)
    chosen = file or printed_log(list(files))
    if chosen not in files:
        there = (
            f"It has: {', '.join(files)}." if files else "It has none yet; it is waiting for its nodes, or its image."
        )
        raise JobError(f"{name} has no log {chosen or 'of its processes'}. {there}")
    with service_errors():
        content = BlobClient.from_blob_url(files[chosen]).download_blob().readall()
    return bytes(content).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class JobSummary:
    """One job.

    Attributes:
        name: what every command takes.
        status: Azure ML's word for how it does.
        experiment, display_name: as submitted.
        created: when, in UTC, to the second.
        compute: name of the cluster; on serverless compute the VM size, or None where Azure ML chooses it.
        nodes: how many.
        studio_url: its page.
        tags: as submitted.
        outputs: names of its outputs.
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
        """Whether it is over."""
        return self.status in FINAL


def list_jobs(
    client: MLClient, limit: int, experiment: str | None = None, status: str | None = None
) -> list[JobSummary]:
    """The newest jobs.

    Args:
        client: of the workspace.
        limit: how many at most.
        experiment: only those of this experiment.
        status: only those in this state, in any case.

    Raises:
        JobError: a limit below 1.
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


def show_job(client: MLClient, name: str) -> JobSummary:
    """One job.

    Raises:
        ServiceError: there is none of this name.
    """
    with service_errors():
        return _summary(client.jobs.get(name))


def job_failure(client: MLClient, name: str) -> str | None:
    """Why a job failed, without secrets; None where Azure ML gives no reason."""

    error = getattr(run_details(client, name).error, "error", None)
    return redact_text(f"{error.code}: {error.message}") if error else None


def cancel_job(client: MLClient, name: str) -> JobSummary:
    """End a job and wait until Azure ML has taken it.

    Raises:
        JobError: it is over.
        ServiceError: there is none of this name, or it is not yours to end.
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
    """Fetch what a job that is over has left.

    Args:
        client: of the workspace.
        name: of the job.
        folder: where to: logs and `./outputs` go to `artifacts/` in it, each output to `named-outputs/NAME/`.
        output: only this output, such as `run`; None: logs and `./outputs`.
        everything: all of that.

    Raises:
        JobError: it is not over, or has no such output.
        ServiceError: there is none of this name, or storage cannot be read.
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
    # A cluster's resource id; without one the job is serverless.
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
