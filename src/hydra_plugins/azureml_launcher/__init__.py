"""The Hydra launcher `hydra/launcher=azureml`, which runs each combination of a sweep as an Azure ML job.

Hydra imports this file whenever it starts, also in a job. So it only names the launcher, and imports
`azureml_strategy.jobs.sweep`, which does the work, when a sweep is launched.
"""

# No `from __future__ import annotations`: it turns annotations into text, which a dataclass resolves through
# sys.modules, and Hydra runs this file without entering it there.
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, configure_log
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from typing_extensions import override


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
        from azureml_strategy.jobs.service_errors import JobError
        from azureml_strategy.jobs.sweep import SweepOptions, sweep_of_application

        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        try:
            options = SweepOptions(*self._arguments)
            return sweep_of_application(
                self._task, self._context.config_loader, self._config, job_overrides, initial_job_idx, options
            )
        except JobError as error:
            raise CompactHydraException(str(error)) from error  # Hydra prints this error without a traceback
