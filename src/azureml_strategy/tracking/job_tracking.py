"""Records a training in the job's MLflow run although its script has no code for that: its metrics, how fast it trains,
and the configuration of LightningCLI.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import Logger, MLFlowLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from azureml_strategy.cluster.environ import CLI_CONFIG_SWITCH, THROUGHPUT_SWITCH, TRACKING_SWITCH
from azureml_strategy.cluster.isolation import IsolatedCallback, fault_text
from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.launch import Launch, PartialLaunch
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.lightning_internals import mlflow_arguments, mlflow_store
from azureml_strategy.tracking.logger import JobMLFlowLogger, job_loggers
from azureml_strategy.tracking.report import RunReport
from azureml_strategy.tracking.run import JobRun, TrackingError, describe_store, job_run
from azureml_strategy.tracking.timing.summary import Totals
from azureml_strategy.tracking.timing.throughput import ThroughputCallback, count_samples

log = logging.getLogger(__name__)

# The store of Lightning's MLFlowLogger that was given none, not even by the environment.
_NO_STORE = "file:./mlruns"
# How long the end of a run waits until the metrics of its last hooks are written.
_END_S = 10.0
# Runs into which this process has begun to log. Only the first Trainer may repeat steps of a previous attempt. If the
# script has a second one, its points are new ones, even under the same names and steps.
_BEGUN: set[JobRun] = set()
# Runs that this process cannot open. There is one warning for each.
_CLOSED: set[JobRun] = set()


class LightningCLIConfig(IsolatedCallback):
    """Makes LightningCLI's `SaveConfigCallback` work where it would raise, and keeps its text with the run.

    That callback refuses to overwrite the file of an earlier run. In a restarted job the file is the job's own, so it
    may. It also needs a logger with a folder. A `JobMLFlowLogger` has none, and gets the text as an artifact of its
    run, without secrets, under the file's name.

    Every Trainer has this callback once the script has imported LightningCLI, inside and outside of jobs.
    """

    switch = CLI_CONFIG_SWITCH

    @override
    def before_run(self, trainer: Trainer) -> None:
        """Set what the other callback may write, before its `setup`."""
        job = read_job()
        for callback in _saving(trainer):
            callback.overwrite |= job is not None and job.attempt > 0
            callback.save_to_log_dir &= not isinstance(trainer.logger, JobMLFlowLogger)

    @override
    @rank_zero_only
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for callback in _saving(trainer):
            for logger in job_loggers(trainer):
                logger.log_text(redact_text(callback.parser.dump(callback.config)), callback.config_filename)


def _saving(trainer: Trainer) -> list[SaveConfigCallback]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, SaveConfigCallback)]


class JobTracking(IsolatedCallback):
    """Has a Trainer log into the run of the job, unless it has no logger at all.

    - A `JobMLFlowLogger` of the script stays as it is, and nothing is added.
    - Lightning's `MLFlowLogger` that would open a second run in the job's store becomes a `JobMLFlowLogger` of the
      job's run. It stays the same object, with its prefix, tags and `log_model`.
    - Beside any other loggers, Lightning's default one among them, comes a `JobMLFlowLogger`, last in the list.
      `trainer.logger` and the folders that are named by it stay. Nothing is added where `mlflow.pytorch.autolog()`
      records the training.

    `Trainer(logger=False)` and `fast_dev_run` stay without. In a restarted job, and where `fit` is given a checkpoint,
    steps that the run has are not logged again.

    Args:
        launch: this process's place in the job; None in a job of one process.
    """

    switch = TRACKING_SWITCH

    def __init__(self, launch: Launch | PartialLaunch | None) -> None:
        self._launch = launch
        self._has_begun = False
        self._added: JobMLFlowLogger | None = None

    @override
    def before_run(self, trainer: Trainer) -> None:
        self._has_begun = True
        self._track(trainer)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._has_begun:
            self._track(trainer)
        self._has_begun = False

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning finalizes loggers before the last hooks, in which callbacks may log.
        for logger in job_loggers(trainer):
            logger.flush(_END_S)

    @override
    def _give_up(self, trainer: Trainer | None) -> None:
        if trainer is not None and self._added is not None:
            trainer.loggers = [each for each in trainer.loggers if each is not self._added]

    def _track(self, trainer: Trainer) -> None:
        run = job_run()
        if run is None or run in _CLOSED or not self._belongs_to_run(trainer):
            return
        would_open_a_run = [each for each in trainer.loggers if isinstance(each, MLFlowLogger) and _joins(each, run)]
        if would_open_a_run:
            for logger in would_open_a_run:
                joined = JobMLFlowLogger(tracking_uri=run.tracking_uri, run_id=run.run_id, **mlflow_arguments(logger))
                if self._open(joined, trainer, run):
                    _become(logger, joined)
        elif not _autologs():
            self._added = self._added or _AddedLogger(tracking_uri=run.tracking_uri, run_id=run.run_id)
            if self._open(self._added, trainer, run):
                trainer.loggers = [*trainer.loggers, self._added]
        _BEGUN.add(run)

    def _belongs_to_run(self, trainer: Trainer) -> bool:
        loggers = trainer.loggers
        if not loggers or any(isinstance(each, (JobMLFlowLogger, DummyLogger)) for each in loggers):
            return False
        # With the guard off, each process may have its own Trainer, and only one of them can be the job's training.
        return self._launch is None or self._launch.rank == 0 or not trainer.is_global_zero

    def _open(self, logger: JobMLFlowLogger, trainer: Trainer, run: JobRun) -> bool:
        """Open the run on rank 0 now, while the training can still go on without it."""
        try:
            _ = logger.experiment
        except TrackingError as error:
            _CLOSED.add(run)
            log.warning(
                "This training goes on, but it is not recorded in the job's MLflow run. %s Or set %s=off.",
                *(error, self.switch),
            )
            return False
        if run not in _BEGUN:
            rank_zero_info(f"Metrics go into the job's MLflow run {run.run_id}. {self.switch}=off leaves that out.")
            job = read_job()
            resumes = trainer.state.fn == TrainerFn.FITTING and trainer.ckpt_path is not None
            if resumes or (job is not None and job.attempt > 0):  # steps may be repeated
                logger.continue_run()
        return True


class JobThroughput(IsolatedCallback, ThroughputCallback, RunReport):
    """Measures a training that is logged into the job's run, unless its script measures it.

    It is a `ThroughputCallback` and a `RunReport` for any script, without a collective. Rank 0 assumes that every rank
    has as many samples as itself, and logs into the job's run only. The other ranks only report their times. If the
    samples of a batch cannot be counted, one line says so, and nothing more is measured. If the script has one of these
    callbacks itself, this one does nothing.
    """

    switch = THROUGHPUT_SWITCH

    def __init__(self) -> None:
        super().__init__(batch_size=self._samples)

    @property
    @override
    def measures(self) -> bool:
        return not self._inert

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        logs = not trainer.is_global_zero or self._loggers(trainer)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        of_script = (each for each in callbacks if each is not self)
        is_measured = any(isinstance(each, (ThroughputCallback, RunReport)) for each in of_script)
        if stage == "fit" and logs and not is_measured:
            super().setup(trainer, pl_module, stage)
        else:
            self._inert = True

    @override
    def _give_up(self, trainer: Trainer | None) -> None:
        self._close_breakdown()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.summary() is not None:
            super().on_fit_end(trainer, pl_module)

    @override
    def _loggers(self, trainer: Trainer) -> list[Logger]:
        return [*job_loggers(trainer)]

    @override
    def _over_ranks(self, trainer: Trainer, totals: Totals) -> Totals:
        # A collective here could hang a script whose ranks have unequal numbers of batches.
        return totals.times(trainer.world_size)

    def _samples(self, batch: Any) -> int:
        try:
            return count_samples(batch)
        except TypeError as reason:
            self._inert = True
            self._close_breakdown()
            rank_zero_info(f"Throughput is not measured. {reason}")
            return 0


class _AddedLogger(JobMLFlowLogger):
    """A logger that the script did not ask for. If it fails, there is one warning, and it logs no more."""

    _has_failed = False

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._try(super().log_metrics, metrics, step)

    @override
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        self._try(super().log_hyperparams, params)

    @override
    def finalize(self, status: str = "success") -> None:
        self._try(super().finalize, status)

    def _try(self, action: Callable[..., None], *arguments: Any) -> None:
        if self._has_failed:
            return
        try:
            action(*arguments)
        except Exception as fault:
            self._has_failed = True
            log.warning(fault_text("The logger of the job's run", TRACKING_SWITCH, fault))


def _joins(logger: MLFlowLogger, run: JobRun) -> bool:
    """Whether Lightning's logger would open a second run in the job's store, or has been given the job's run."""
    store, own_run_id = mlflow_store(logger)
    same_store = store == _NO_STORE or describe_store(store) == describe_store(run.tracking_uri)
    return same_store and own_run_id in (None, run.run_id)


def _become(logger: MLFlowLogger, joined: JobMLFlowLogger) -> None:
    """Turn a logger into another one in place, because the script may have other references to it.

    If its class is a subclass of the script, that class keeps its methods, and inherits from `JobMLFlowLogger` as well.
    """
    kind = type(logger)
    both = JobMLFlowLogger if kind is MLFlowLogger else type(kind.__name__, (kind, JobMLFlowLogger), {})
    logger.__class__ = both
    vars(logger).update(vars(joined))


def _autologs() -> bool:
    """Whether `mlflow.autolog()` or `mlflow.pytorch.autolog()` is on."""
    autologging = sys.modules.get("mlflow.utils.autologging_utils")
    return autologging is not None and not autologging.autologging_is_disabled("pytorch")
