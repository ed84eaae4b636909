"""Lets LightningCLI save its configuration in a job: again after a restart, and into the job's run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from azureml_strategy.cluster.environ import CLI_CONFIG_SWITCH
from azureml_strategy.cluster.isolation import IsolatedCallback
from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.tracking.logger import JobMLFlowLogger, job_loggers


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
        """Tell the other callback what it may write, before its `setup`."""
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
