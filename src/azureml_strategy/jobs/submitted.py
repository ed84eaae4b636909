"""A job that was submitted: how it does, and waiting for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.listing import FINAL, show_job
from azureml_strategy.jobs.service_errors import ServiceError

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

# Seconds between two questions about a job: soon at first, as it may fail at once, and then so that few are asked.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 30.0
# Questions in a row without an answer before the wait is given up; azure-core has repeated each of them already.
_PATIENCE = 20


class SubmittedJob:
    """A job in a workspace.

    Args:
        client: of its workspace.
        name: of the job.
        studio_url: its page.

    Attributes:
        name: of the job, unique in its workspace.
        studio_url: its page in Azure ML Studio.
    """

    def __init__(self, client: MLClient, name: str, studio_url: str) -> None:
        self._client = client
        self.name = name
        self.studio_url = studio_url

    @property
    def run_id(self) -> str:
        """Of its run in MLflow: Azure ML gives it the job's name."""
        return self.name

    @property
    def client(self) -> MLClient:
        """Of its workspace."""
        return self._client

    def status(self) -> str:
        """Azure ML's word for how it is doing: Queued, Preparing, Running, Completed, Failed, Canceled, ...

        Raises:
            ServiceError: Azure did not say.
        """
        return show_job(self._client, self.name).status

    def wait(self, timeout: float | None = None) -> str:
        """Wait until it is over.

        Args:
            timeout: seconds; None for as long as it takes.

        Returns:
            Completed, Failed or Canceled.

        Raises:
            JobError: it is not over in time; it goes on.
            ServiceError: Azure no longer answers.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause, silent = _FIRST_PAUSE_S, 0
        while True:
            try:
                status, silent = self.status(), 0
            except ServiceError as error:
                status, silent = "unknown", silent + 1
                if silent > _PATIENCE or error.status in (401, 403, 404):
                    raise
            if status in FINAL:
                return status
            left = pause if end is None else min(pause, end - time.monotonic())
            if left <= 0:
                raise JobError(f"Job {self.name} is not over after {timeout:g} seconds, but {status}. It goes on.")
            time.sleep(left)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
