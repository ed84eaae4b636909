"""Runs a sweep: submits one job per combination, a few at a time, waits for them and reads their metrics."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from azureml_strategy.jobs.listing import FINAL
from azureml_strategy.jobs.metrics import run_metrics, tracking_uri
from azureml_strategy.jobs.render import render_job
from azureml_strategy.jobs.service_errors import JobError, ServiceError
from azureml_strategy.jobs.submit import SubmittedJob, submit_recipe
from azureml_strategy.training.recipes import near_matches

log = logging.getLogger(__name__)

# Failed status requests in a row after which a job is given up.
_PATIENCE = 20


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep.

    Args:
        wait: whether to wait until every job is over, or only until all are submitted.
        max_concurrent: most jobs that are queued or run at the same time. None is all of them.
        poll_interval_s: seconds between two status requests for the jobs.
        metric: name of the metric that every job must log, such as `val/top1`. None requires no metric.

    Raises:
        JobError: a number is out of range, or `max_concurrent` or `metric` is set without `wait`.
    """

    wait: bool = True
    max_concurrent: int | None = None
    poll_interval_s: float = 30.0
    metric: str | None = None

    def __post_init__(self) -> None:
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise JobError(f"max_concurrent={self.max_concurrent} lets no job start; use 1 or more, or null for all.")
        if self.max_concurrent is not None and not self.wait:
            raise JobError(
                "max_concurrent needs wait=true: who does not wait for the first jobs cannot start the next ones. "
                "Leave one of the two out; the nodes of the compute limit how many jobs run at once."
            )
        if self.metric is not None and not self.wait:
            raise JobError(f"metric={self.metric} is known only at the end of a job. Leave it out, or set wait=true.")
        if self.poll_interval_s <= 0:
            raise JobError(f"poll_interval_s={self.poll_interval_s} must be more than 0 seconds.")


@dataclass
class SweepJob:
    """The job of one combination.

    Attributes:
        number: number of the job in the sweep.
        overrides: overrides of the recipe, as the user would type them.
        name: name of the job in Azure ML.
        studio_url: the job's page in Azure ML Studio; None before it is submitted.
        status: Azure ML's word for the state of the job; None before it is submitted.
        metrics: the last value of each metric, once the job is over.
        error: why the job could not be submitted or followed.
    """

    number: int
    overrides: Sequence[str]
    name: str
    studio_url: str | None = None
    status: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def problem(self, options: SweepOptions) -> str | None:
        """What went wrong with this job: an error, a failure or a missing metric; None if nothing did."""
        if self.error:
            return f"{self.describe()}: {self.error}"
        if options.wait and self.status != "Completed":
            return (
                f"{self.describe()} ended as {self.status}. Type `azureml-strategy jobs logs {self.name}` to see why, "
                f"or open {self.studio_url}"
            )
        if options.metric is not None and options.metric not in self.metrics:
            near = near_matches(options.metric, self.metrics) if self.metrics else "It logged none."
            return f"{self.describe()} logged no metric {options.metric!r}. {near}"
        return None

    def describe(self) -> str:
        """Describe the job by number, name and overrides."""
        return f"#{self.number} {self.name} ({' '.join(self.overrides) or 'no overrides'})"


def plan_sweep(recipe: str, combinations: Sequence[Sequence[str]], first: int = 0) -> list[SweepJob]:
    """Plan the jobs of a sweep, and render each once to find errors before the first one starts.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        combinations: the overrides of each job.
        first: number of the first job.

    Raises:
        JobError: a combination gives an invalid job, or two jobs would write to the same path.
    """
    # Each sweep has its own prefix: job names are unique in a workspace, and the jobs of a sweep sort together.
    sweep = f"sweep-{secrets.token_hex(4)}"
    jobs = [SweepJob(first + place, each, f"{sweep}-{first + place}") for place, each in enumerate(combinations)]
    writers: dict[str, SweepJob] = {}
    for job in jobs:
        for name, output in render_job(recipe, job.overrides, name=job.name).outputs.items():
            if output.path and "${{name}}" not in output.path:
                _refuse_sharing(name, output.path, job, writers.setdefault(output.path, job))
    return jobs


def _refuse_sharing(output: str, path: str, job: SweepJob, other: SweepJob) -> None:
    if job is not other:
        raise JobError(
            f"Jobs #{other.number} and #{job.number} would both write into {path}. Each gets a folder of its own "
            f"without job.outputs.{output}.path, or with \\${{{{name}}}} in it, which stands for the job's name."
        )


def run_sweep(recipe: str, jobs: Sequence[SweepJob], options: SweepOptions) -> None:
    """Submit the jobs, wait for them if `options` says so, and set the status, metrics or error of each.

    If the first job cannot be submitted, the sweep ends: the cause (no workspace, no sign-in, no permission) usually
    affects all jobs. If a later job cannot be submitted, the others still are.

    Args:
        recipe: name or path of the recipe, as for `plan_sweep`.
        jobs: jobs from `plan_sweep`.
        options: whether to wait, and how many jobs run at a time.

    Raises:
        JobError: the first job could not be submitted, so that none was.
    """
    waiting, running = deque(jobs), list[_RunningJob]()
    while waiting or running:
        while waiting and len(running) < (options.max_concurrent or len(jobs)):
            job = waiting.popleft()
            submitted = _submit(recipe, job, is_first=job is jobs[0])
            running += [submitted] if submitted else []
        if not options.wait:
            break
        running = [each for each in running if not each.is_over()]
        if running:
            time.sleep(options.poll_interval_s)


def _submit(recipe: str, job: SweepJob, is_first: bool) -> _RunningJob | None:
    try:
        submitted = submit_recipe(recipe, job.overrides, name=job.name)
    except JobError as error:
        if is_first:
            raise
        job.error = str(error)
        log.error("%s was not submitted: %s", job.describe(), error)
        return None
    job.status, job.studio_url = "Submitted", submitted.studio_url
    log.info("%s: %s", job.describe(), job.studio_url)
    return _RunningJob(job, submitted)


class _RunningJob:
    """A job that is queued or running."""

    def __init__(self, job: SweepJob, submitted: SubmittedJob) -> None:
        self._job = job
        self._submitted = submitted
        self._unanswered = 0

    def is_over(self) -> bool:
        """Update the status of the job, and read its metrics once it is over. True also if the job is given up."""
        try:
            self._job.status = self._submitted.status()
        except ServiceError as error:  # the job goes on without the connection
            self._unanswered += 1
            log.warning("%s: how it is doing is not known: %s", self._job.describe(), error)
            if self._unanswered < _PATIENCE and error.status not in (401, 403, 404):
                return False
            self._job.error = f"How it ended is not known; it may go on. {error}"
            return True
        self._unanswered = 0
        if self._job.status not in FINAL:
            return False
        metrics = self._job.metrics = _read_metrics(self._submitted)
        # The train, validation and test metrics, without those of speed.
        shown = [
            f"{name} {metrics[name]:.4g}" for name in sorted(metrics) if name.startswith(("train/", "val/", "test/"))
        ]
        log.info("%s: %s %s", self._job.describe(), self._job.status, ", ".join(shown))
        return True


def _read_metrics(submitted: SubmittedJob) -> dict[str, float]:
    from mlflow.exceptions import MlflowException

    try:
        return run_metrics(tracking_uri(submitted.client), submitted.run_id)
    except (MlflowException, ServiceError) as error:
        log.warning("The metrics of %s could not be read: %s", submitted.name, error)
        return {}
