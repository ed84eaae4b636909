"""`hydra/launcher=azureml`: each combination of a sweep is a job in Azure ML."""

# No `from __future__ import annotations`: Hydra runs this file without entering it into sys.modules, where a dataclass
# looks for what its annotations mean if they are text.
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus, configure_log
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from typing_extensions import override

if TYPE_CHECKING:
    from azureml_strategy.jobs.sweep import SweepJob, SweepOptions

_APPLICATION = "azureml_strategy.training.app"
# What is for the sweep here and not for its jobs.
_OF_THE_SWEEP = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper", "hydra.sweep.", "hydra.mode")


@dataclass
class AzureMLLauncherConf:
    """Settings of `hydra.launcher`; see `AzureMLLauncher`."""

    _target_: str = "hydra_plugins.azureml_launcher.AzureMLLauncher"
    wait: bool = True
    max_concurrent: int | None = None
    poll_interval_s: float = 30.0
    metric: str | None = None


ConfigStore.instance().store(
    group="hydra/launcher", name="azureml", node=AzureMLLauncherConf, provider="azureml-strategy"
)


class AzureMLLauncher(Launcher):
    """Submits `azureml-strategy train RECIPE ...` as one job for each combination.

    What a job returns to the sweeper is a dictionary of its name, its page in the studio, status and metrics; or, for a
    sweeper that searches for the best, the one number that `metric` names. A job that failed fails the sweep, after the
    others are over.

    Args:
        wait: until every job is over; else only until all are submitted.
        max_concurrent: jobs that are queued or run at the same time; None for all of them.
        poll_interval_s: seconds between two looks at the jobs.
        metric: the logged metric that a job returns, such as `val/top1`.
    """

    def __init__(self, wait: bool, max_concurrent: int | None, poll_interval_s: float, metric: str | None) -> None:
        self._arguments = (wait, max_concurrent, poll_interval_s, metric)

    @override
    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._task, self._config = hydra_context, task_function, config

    @override
    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from azureml_strategy.jobs import JobError
        from azureml_strategy.jobs.sweep import SweepOptions, plan_sweep, run_sweep

        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        try:
            self._refuse_misuse()
            options = SweepOptions(*self._arguments)
            recipe, passed_on = _recipe(self._config), _passed_on(self._config)
            with _hydra_set_aside():
                jobs = plan_sweep(recipe, [[*each, *passed_on] for each in job_overrides], initial_job_idx)
                run_sweep(recipe, jobs, options)
        except JobError as error:
            raise CompactHydraException(str(error)) from error  # which Hydra prints without a traceback
        return [self._returned(job, each, options) for job, each in zip(jobs, job_overrides, strict=True)]

    def _refuse_misuse(self) -> None:
        from azureml_strategy.cluster import detect_launch
        from azureml_strategy.jobs import JobError

        if self._task.__module__ != _APPLICATION:
            raise JobError(
                "hydra/launcher=azureml submits recipes, and this is an application of your own, which the jobs would "
                "not run. Type: azureml-strategy train RECIPE.yaml -m hydra/launcher=azureml ..."
            )
        if detect_launch() is not None:
            raise JobError(
                "hydra/launcher=azureml was asked for inside a job, where each process would submit the whole sweep. "
                "Start the sweep from your own machine, or leave hydra/launcher out to run it in this job."
            )

    def _returned(self, job: "SweepJob", overrides: Sequence[str], options: "SweepOptions") -> JobReturn:
        composed = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(composed):
            composed.hydra.job.id, composed.hydra.job.num = job.name, job.number
        returned = JobReturn(
            overrides=list(overrides),
            cfg=OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]),
            hydra_cfg=OmegaConf.masked_copy(composed, ["hydra"]),
            working_dir=str(Path.cwd()),
            task_name=composed.hydra.job.name,
        )
        wrong = job.problem(options)
        returned.status = JobStatus.FAILED if wrong else JobStatus.COMPLETED
        returned.return_value = CompactHydraException(wrong) if wrong else _value(job, options.metric)
        return returned


def _value(job: "SweepJob", metric: str | None) -> Any:
    if metric is not None:
        return job.metrics[metric]
    return {"name": job.name, "studio_url": job.studio_url, "status": job.status, "metrics": job.metrics}


def _recipe(config: DictConfig) -> str:
    """What the user typed for RECIPE: a shipped name, or where the file lies."""
    name = f"{config.hydra.job.config_name}"
    folders = [Path(source.path) for source in config.hydra.runtime.config_sources if source.schema == "file"]
    found = [folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file()]
    return str(found[0]) if found else name


def _passed_on(config: DictConfig) -> list[str]:
    """Overrides of Hydra's own settings that are for the jobs."""
    given = map(str, config.hydra.overrides.hydra)
    return [each for each in given if not each.lstrip("+").startswith(_OF_THE_SWEEP)]


@contextmanager
def _hydra_set_aside() -> Iterator[None]:
    """Let a recipe be composed while Hydra's application runs, which it refuses otherwise."""
    hydra = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = hydra
