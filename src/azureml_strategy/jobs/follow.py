"""Follows a submitted job: reads its status, waits for it, and prints its log as it comes."""

from __future__ import annotations

import io
import re
import statistics
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from typing_extensions import override

from azureml_strategy.jobs.listing import (
    FINAL,
    download_job,
    job_failure,
    log_files,
    printed_log,
    read_log,
    run_metrics,
    show_job,
    tracking_uri,
)
from azureml_strategy.jobs.service_errors import JobError, ServiceError, translate

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

# Seconds between two status requests: short at first, since a job may fail at once, then longer to send few requests.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 30.0
# After so many unanswered status requests in a row, the wait is given up. azure-core has already retried each.
_PATIENCE = 20
# What ThroughputProgressBar prints: "Epoch 5: batch 22/22, images/s 146.5, train/loss 0.43".
_RATE = re.compile(r"\bEpoch \d+: batch .*?, (?P<unit>\w+)/s (?P<rate>[\d.]+)")


class SubmittedJob:
    """A job in a workspace.

    Attributes:
        client: client of the job's workspace.
        name: name of the job, unique in its workspace.
        studio_url: the job's page in Azure ML Studio.
    """

    def __init__(self, client: MLClient, name: str, studio_url: str) -> None:
        self.client = client
        self.name = name
        self.studio_url = studio_url

    @property
    def run_id(self) -> str:
        """Id of the job's MLflow run: Azure ML gives the run the job's name."""
        return self.name

    def status(self) -> str:
        """Azure ML's word for the state of the job: Queued, Preparing, Running, Completed, Failed, Canceled, ...

        Raises:
            ServiceError: Azure did not answer.
        """
        return show_job(self.client, self.name).status

    def logs(self, file: str | None = None) -> str:
        """What a process of the job has printed.

        Args:
            file: a log of the job, such as `user_logs/std_log_process_1.txt`; by default that of the first process.

        Raises:
            JobError: the job has no such log, or none yet.
            ServiceError: Azure did not answer.
        """
        return read_log(self.client, self.name, file)

    def metrics(self) -> dict[str, float]:
        """The last value of each metric in the job's MLflow run.

        Raises:
            ServiceError: Azure did not answer.
            mlflow.exceptions.MlflowException: the workspace's MLflow did not answer, or azureml-mlflow is missing.
        """
        return run_metrics(tracking_uri(self.client), self.run_id)

    def download(self, folder: str | Path = ".", output: str | None = None) -> Path:
        """Fetch files of the job.

        Args:
            folder: local folder that receives them.
            output: name of one output, such as `run`; None fetches the logs and `./outputs`.

        Returns:
            The local folder: logs and `./outputs` are in its `artifacts`, an output in its `named-outputs/NAME`.

        Raises:
            JobError: the job has no such output, or is not over.
            ServiceError: Azure did not answer.
        """
        download_job(self.client, self.name, Path(folder), output=output)
        return Path(folder)

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the job is over.

        Args:
            timeout: seconds to wait at most. None waits without limit.

        Returns:
            Completed, Failed or Canceled.

        Raises:
            JobError: the job is not over in time. It goes on.
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


class LogReader(io.TextIOBase):
    """Passes a log on, and collects the training rates in it.

    Args:
        out: stream that receives the log.

    Attributes:
        streamed: whether azure-ai-ml has begun to print a log.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._line = ""
        self._rates: dict[str, list[float]] = {}
        self.streamed = False

    @override
    def write(self, text: str) -> int:
        self._out.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self.streamed = self.streamed or line.startswith("Streaming user_logs/")
            found = _RATE.search(line)
            if found:
                self._rates.setdefault(found["unit"], []).append(float(found["rate"]))
        return len(text)

    @override
    def flush(self) -> None:
        self._out.flush()

    def throughput(self) -> str | None:
        """The median of each rate; None if the log contains no rate."""
        if not self._rates:
            return None
        parts = [f"{statistics.median(rates):,.1f} {unit}/s" for unit, rates in self._rates.items()]
        return f"{', '.join(parts)} (median of {max(map(len, self._rates.values()))} readings)"


def follow_job(job: SubmittedJob, out: TextIO | None = None) -> str:
    """Print a job's log until it is over, then its throughput and status, to standard output or another stream.

    Returns:
        Status of the job: Completed, Failed or Canceled, or another one if the user stopped following.

    Raises:
        ServiceError: Azure no longer answers. The job goes on.
    """
    from azure.ai.ml.exceptions import JobException
    from azure.core.exceptions import AzureError

    out = out or sys.stdout
    reader = LogReader(out)
    with redirect_stdout(reader):  # azure-ai-ml can only print the log to standard output
        try:
            job.client.jobs.stream(job.name)
        except JobException:
            pass  # azure-ai-ml raises it for a failed job and for Ctrl-C; both are reported below
        except AzureError as error:
            raise translate(error) from error
    status = job.status()
    # azure-ai-ml prints no log of a job that was already over.
    if status in FINAL and not reader.streamed and printed_log(list(log_files(job.client, job.name))) is not None:
        reader.write(read_log(job.client, job.name))
    throughput = reader.throughput()
    if throughput:
        out.write(f"Throughput: {throughput}\n")
    out.write(f"Status: {status}\n")
    if status == "Failed":
        out.write(f"{job_failure(job.client, job.name) or 'Azure ML gives no reason.'}\n")
    if status not in FINAL:
        out.write(f"The job goes on. `azureml-strategy jobs cancel {job.name}` ends it.\n")
    return status
