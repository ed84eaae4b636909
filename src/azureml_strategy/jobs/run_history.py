"""A job's record in the workspace's run history: its logs, and why it failed.

azure-ai-ml prints logs and errors, but gives them out nowhere; this is the request that its own `jobs.stream` makes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.service_errors import service_errors

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

# What the processes of a job print: one file for each, or one for all. The first process is the one that reports.
_PRINTED = re.compile(r"user_logs/std_log(?:_process_(\d+))?\.txt")


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
