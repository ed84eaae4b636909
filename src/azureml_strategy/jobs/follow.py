"""Follows a job: its log as it is written, and how fast it trains."""

from __future__ import annotations

import io
import re
import statistics
import sys
from contextlib import redirect_stdout
from typing import TextIO

from typing_extensions import override

from azureml_strategy.jobs.listing import FINAL, job_failure
from azureml_strategy.jobs.run_history import log_files, printed_log, read_log
from azureml_strategy.jobs.service_errors import translate
from azureml_strategy.jobs.submitted import SubmittedJob

# What ThroughputProgressBar prints: "Epoch 5: batch 22/22, images/s 146.5, train/loss 0.43".
_RATE = re.compile(r"\bEpoch \d+: batch .*?, (?P<unit>\w+)/s (?P<rate>[\d.]+)")


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
