"""A submitted job: how it does, waiting for it, and its logs as they come."""

from __future__ import annotations

import io
import re
import statistics
import sys
import time
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, TextIO

from typing_extensions import override

from azureml_strategy.jobs.listing import FINAL, job_failure, log_files, printed_log, read_log, show_job
from azureml_strategy.jobs.service_errors import JobError, ServiceError, translate

if TYPE_CHECKING:
    from azure.ai.ml import MLClient


# Seconds between two questions about a job: soon at first, as it may fail at once, and then so that few are asked.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 30.0
# Questions in a row without an answer before the wait is given up; azure-core has repeated each of them already.
_PATIENCE = 20

# What ThroughputProgressBar prints: "Epoch 5: batch 22/22, images/s 146.5, train/loss 0.43".
_RATE = re.compile(r"\bEpoch \d+: batch .*?, (?P<unit>\w+)/s (?P<rate>[\d.]+)")


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


class LogReader(io.TextIOBase):
    """Passes a log on, and keeps the rates of training that it tells of.

    Args:
        out: where the log goes.

    Attributes:
        streamed: whether azure-ai-ml has printed anything of a log.
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
        """The median of each rate; None where the log tells of none."""
        if not self._rates:
            return None
        parts = [f"{statistics.median(rates):,.1f} {unit}/s" for unit, rates in self._rates.items()]
        return f"{', '.join(parts)} (median of {max(map(len, self._rates.values()))} readings)"


def follow_job(job: SubmittedJob, out: TextIO | None = None) -> str:
    """Print a job's log until it is over, and then how fast it trained.

    Args:
        job: queued, running, or over already.
        out: where to print; standard output by default.

    Returns:
        How it stands: Completed, Failed or Canceled; another word where the user has stopped looking.

    Raises:
        ServiceError: Azure no longer answers. The job goes on.
    """
    out = out or sys.stdout
    reader = LogReader(out)
    with redirect_stdout(reader):  # azure-ai-ml prints the log, and takes no other place for it
        _stream(job)
    status = job.status()
    if status in FINAL and not reader.streamed:
        _print_all(job, reader)
    throughput = reader.throughput()
    if throughput:
        out.write(f"Throughput: {throughput}\n")
    out.write(f"Status: {status}\n")
    if status == "Failed":
        out.write(f"{job_failure(job.client, job.name) or 'Azure ML gives no reason.'}\n")
    if status not in FINAL:
        out.write(f"The job goes on. `azureml-strategy jobs cancel {job.name}` ends it.\n")
    return status


def _print_all(job: SubmittedJob, reader: LogReader) -> None:
    """The log of a job that was over before azure-ai-ml looked for it, which then prints none of it."""
    files = log_files(job.client, job.name)
    if printed_log(list(files)) is not None:
        reader.write(read_log(job.client, job.name))


def _stream(job: SubmittedJob) -> None:
    from azure.ai.ml.exceptions import JobException
    from azure.core.exceptions import AzureError

    try:
        job.client.jobs.stream(job.name)
    except JobException:
        pass  # how azure-ai-ml reports a job that failed, and a user who interrupts; both are told of by the caller
    except AzureError as error:
        raise translate(error) from error
