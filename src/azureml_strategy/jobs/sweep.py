"""Runs a sweep of `hydra/launcher=azureml`: submits one job per combination, a few at a time, waits, reads metrics."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from azureml_strategy.cluster.launchers import detect_ranks
from azureml_strategy.command_line import as_typed
from azureml_strategy.jobs.listing import FINAL, run_metrics, tracking_uri
from azureml_strategy.jobs.render import render_job
from azureml_strategy.jobs.service_errors import JobError, ServiceError
from azureml_strategy.jobs.submit import SubmittedJob, submit_recipe
from azureml_strategy.training.recipes import near_matches

log = logging.getLogger(__name__)

# Failed status requests in a row after which a job is given up.
_PATIENCE = 20
_APPLICATION = "azureml_strategy.training.app"
# Overrides that are for the sweep on this machine, not for its jobs.
_OF_THE_SWEEP = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper", "hydra.sweep.", "hydra.mode")


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep.

    Attributes:
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
        submitted: the job, once it is submitted.
        unanswered: failed status requests in a row.
    """

    number: int
    overrides: Sequence[str]
    name: str
    studio_url: str | None = None
    status: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    submitted: SubmittedJob | None = field(default=None, repr=False, compare=False)
    unanswered: int = 0

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

    def submit(self, recipe: str) -> None:
        """Submit the job.

        Raises:
            JobError: the job is invalid, or Azure refused it.
        """
        self.submitted = submit_recipe(recipe, self.overrides, name=self.name)
        self.status, self.studio_url = "Submitted", self.submitted.studio_url
        log.info("%s: %s", self.describe(), self.studio_url)

    def is_over(self) -> bool:
        """Update the status, and read the metrics once the job is over. True also if the job is given up."""
        assert self.submitted is not None
        try:
            self.status = self.submitted.status()
        except ServiceError as error:  # the job goes on without the connection
            self.unanswered += 1
            log.warning("%s: how it is doing is not known: %s", self.describe(), error)
            if self.unanswered < _PATIENCE and error.status not in (401, 403, 404):
                return False
            self.error = f"How it ended is not known; it may go on. {error}"
            return True
        self.unanswered = 0
        if self.status not in FINAL:
            return False
        metrics = self.metrics = _read_metrics(self.submitted)
        # The train, validation and test metrics, without those of speed.
        shown = [
            f"{name} {metrics[name]:.4g}" for name in sorted(metrics) if name.startswith(("train/", "val/", "test/"))
        ]
        log.info("%s: %s %s", self.describe(), self.status, ", ".join(shown))
        return True


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
                other = writers.setdefault(output.path, job)
                if other is not job:
                    raise JobError(
                        f"Jobs #{other.number} and #{job.number} would both write into {output.path}. Each gets a "
                        f"folder of its own without job.outputs.{name}.path, or with \\${{{{name}}}} in it, which "
                        "stands for the job's name."
                    )
    return jobs


def run_sweep(recipe: str, jobs: Sequence[SweepJob], options: SweepOptions) -> None:
    """Submit the jobs, wait for them if `options` says so, and set the status, metrics or error of each.

    If the first job cannot be submitted, the sweep ends: the cause (no workspace, no sign-in, no permission) usually
    affects all jobs. If a later job cannot be submitted, the others still are.

    Raises:
        JobError: the first job could not be submitted, so that none was.
    """
    waiting, running = deque(jobs), list[SweepJob]()
    while waiting or running:
        while waiting and len(running) < (options.max_concurrent or len(jobs)):
            job = waiting.popleft()
            try:
                job.submit(recipe)
                running.append(job)
            except JobError as error:
                if job is jobs[0]:
                    raise
                job.error = str(error)
                log.error("%s was not submitted: %s", job.describe(), error)
        if not options.wait:
            break
        running = [each for each in running if not each.is_over()]
        if running:
            time.sleep(options.poll_interval_s)


def _read_metrics(submitted: SubmittedJob) -> dict[str, float]:
    from mlflow.exceptions import MlflowException

    try:
        return run_metrics(tracking_uri(submitted.client), submitted.run_id)
    except (MlflowException, ServiceError) as error:
        log.warning("The metrics of %s could not be read: %s", submitted.name, error)
        return {}


def sweep_of_application(
    task: TaskFunction,
    loader: ConfigLoader,
    config: DictConfig,
    combinations: Sequence[Sequence[str]],
    first: int,
    options: SweepOptions,
) -> list[JobReturn]:
    """Run the combinations of a sweep of Hydra's application as jobs, and return what its launcher has to return.

    Args:
        task: function of the application.
        loader: composes the configuration of a combination.
        config: configuration of the sweep.
        combinations: the overrides of each job.
        first: number of the first job.
        options: whether to wait, and how many jobs run at a time.

    Returns:
        For each job a dictionary of its name, its page in the studio, its status and its metrics, or the one number
        that `options.metric` names; or its error.

    Raises:
        JobError: the application is not ours, this process is one of a job, a combination gives an invalid job, or the
            first job could not be submitted.
    """
    _refuse_misuse(task)
    recipe, typed = _recipe(config), as_typed(config.hydra.overrides.hydra)
    passed_on = [each for each in typed if not each.lstrip("+").startswith(_OF_THE_SWEEP)]
    with _hydra_set_aside():
        jobs = plan_sweep(recipe, [[*each, *passed_on] for each in combinations], first)
        run_sweep(recipe, jobs, options)
    composed = [loader.load_sweep_config(config, list(each)) for each in combinations]
    return [
        _returned(job, options, each, list(overrides))
        for job, each, overrides in zip(jobs, composed, combinations, strict=True)
    ]


def _refuse_misuse(task: TaskFunction) -> None:
    if task.__module__ != _APPLICATION:
        raise JobError(
            "hydra/launcher=azureml submits recipes, and this is an application of your own, which the jobs would "
            "not run. Type: azureml-strategy train RECIPE.yaml -m hydra/launcher=azureml ..."
        )
    if detect_ranks() is not None:
        raise JobError(
            "hydra/launcher=azureml was asked for inside a job, where each process would submit the whole sweep. "
            "Start the sweep from your own machine, or leave hydra/launcher out to run it in this job."
        )


def _returned(job: SweepJob, options: SweepOptions, composed: DictConfig, overrides: list[str]) -> JobReturn:
    with open_dict(composed):
        composed.hydra.job.id, composed.hydra.job.num = job.name, job.number
    returned = JobReturn(
        overrides=overrides,
        cfg=OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]),
        hydra_cfg=OmegaConf.masked_copy(composed, ["hydra"]),
        working_dir=str(Path.cwd()),
        task_name=composed.hydra.job.name,
    )
    wrong = job.problem(options)
    returned.status = JobStatus.FAILED if wrong else JobStatus.COMPLETED
    value: Any = {"name": job.name, "studio_url": job.studio_url, "status": job.status, "metrics": job.metrics}
    if options.metric is not None and not wrong:
        value = job.metrics[options.metric]
    returned.return_value = CompactHydraException(wrong) if wrong else value
    return returned


def _recipe(config: DictConfig) -> str:
    """Return the RECIPE that the user typed: the path of its file, or the name of a shipped recipe."""
    name = f"{config.hydra.job.config_name}"
    folders = [Path(source.path) for source in config.hydra.runtime.config_sources if source.schema == "file"]
    found = [folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file()]
    return str(found[0]) if found else name


@contextmanager
def _hydra_set_aside() -> Iterator[None]:
    """Allow a recipe to be composed while a Hydra application runs; Hydra refuses that otherwise."""
    hydra = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = hydra
