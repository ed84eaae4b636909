"""The Hydra launcher `hydra/launcher=azureml`, which runs each combination of a sweep as an Azure ML job."""

# No `from __future__ import annotations`: it turns annotations into text, which a dataclass resolves through
# sys.modules, and Hydra runs this file without entering it there.
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
# Overrides that are for the sweep on this machine, not for its jobs.
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

    Each job returns a dictionary to the sweeper: the job's name, its page in the studio, its status and its metrics. If
    `metric` is set, for a sweeper that searches for the best combination, the job returns that one number. A failed job
    fails the sweep after the other jobs have ended.

    Args:
        wait: whether to wait until every job has ended, or only until all are submitted.
        max_concurrent: number of jobs that are queued or run at the same time; None for all.
        poll_interval_s: seconds between two polls of the jobs.
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
            raise CompactHydraException(str(error)) from error  # Hydra prints this error without a traceback
        return [self._returned(job, each, options) for job, each in zip(jobs, job_overrides, strict=True)]

    def _refuse_misuse(self) -> None:
        from azureml_strategy.cluster.launchers import detect_ranks
        from azureml_strategy.jobs import JobError

        if self._task.__module__ != _APPLICATION:
            raise JobError(
                "hydra/launcher=azureml submits recipes, and this is an application of your own, which the jobs would "
                "not run. Type: azureml-strategy train RECIPE.yaml -m hydra/launcher=azureml ..."
            )
        if detect_ranks() is not None:
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
    """Return the RECIPE that the user typed: the path of its file, or the name of a shipped recipe."""
    name = f"{config.hydra.job.config_name}"
    folders = [Path(source.path) for source in config.hydra.runtime.config_sources if source.schema == "file"]
    found = [folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file()]
    return str(found[0]) if found else name


def _passed_on(config: DictConfig) -> list[str]:
    """Return the overrides of Hydra's own settings that the jobs need."""
    from azureml_strategy.command_line import as_typed

    return [each for each in as_typed(config.hydra.overrides.hydra) if not each.lstrip("+").startswith(_OF_THE_SWEEP)]


@contextmanager
def _hydra_set_aside() -> Iterator[None]:
    """Allow a recipe to be composed while a Hydra application runs; Hydra refuses that otherwise."""
    hydra = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = hydra
