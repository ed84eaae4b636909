"""Makes a fit resume by itself, as if it had been given the path of the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from azureml_strategy.checkpoint.elastic import ElasticRestart
from azureml_strategy.checkpoint.fit_folder import folder_of_fit, is_of_this_run, name_of_fit, this_process
from azureml_strategy.checkpoint.folder import this_run
from azureml_strategy.checkpoint.resume import ANY, AUTO, ResumeError, choose_together
from azureml_strategy.cluster.job import read_job
from azureml_strategy.control.gather import GroupExchange
from azureml_strategy.control.store import StepError
from azureml_strategy.interfaces import ContinuesRun
from azureml_strategy.lightning_internals import given_checkpoint, only_searches, restore_from

log = logging.getLogger(__name__)
ReadContext = Callable[[], AbstractContextManager[None]]


class FitResume:
    """Chooses the checkpoint that a fit resumes from, and hands it to Lightning, to the loggers and to the Trainer.

    Args:
        resume: as in `checkpoint_to_resume`: `auto`, `any`, `never`, or the path of a checkpoint.
        global_batch: as in `ElasticRestart`.
        skip_other_runs: pass over folders with another run's checkpoints, where `auto` would refuse to start.
        process: `this_process()` of the script, where a process that it forked or spawned for the fit makes this.

    Attributes:
        checkpoint: what this fit resumes from; None if it starts anew, or was given a path.

    Raises:
        ResumeError: `global_batch` is neither `keep` nor `change`.
    """

    def __init__(
        self,
        resume: str,
        global_batch: Literal["keep", "change"] = "keep",
        skip_other_runs: bool = False,
        process: str | None = None,
    ) -> None:
        self._resume = resume
        self._global_batch = global_batch
        self._skip_other_runs = skip_other_runs
        self._process = process or this_process()
        self.checkpoint: Path | None = None
        self.elastic = ElasticRestart(None, global_batch)

    def folder(self, trainer: Trainer, module: LightningModule, base: Path) -> Path:
        """Return the folder of this fit, the same on all ranks; a collective.

        Args:
            trainer: in a callback's `setup`.
            module: what is trained.
            base: the folder, if the script had one fit only.

        Raises:
            ResumeError: on all ranks, if the folder cannot be used.
        """
        fit, run_id = name_of_fit(trainer, module), this_run()
        in_place = self._resume == AUTO and run_id is not None
        own_only = self._skip_other_runs and self._resume == AUTO

        def take() -> Path:
            usable = (lambda folder: is_of_this_run(folder, run_id)) if own_only else (lambda folder: True)
            return folder_of_fit(base, fit, self._process, in_place, usable)

        if trainer.world_size == 1:
            return take()
        try:
            return GroupExchange(trainer.global_rank).on_rank_zero(take)
        except StepError as error:
            raise ResumeError(f"No checkpoint can be kept in {base}: {error}. Give another dirpath.") from error

    def setup(
        self, trainer: Trainer, module: LightningModule, folder: Path, reading: ReadContext = nullcontext
    ) -> None:
        """Prepare the fit to resume. Call it in a callback's `setup`, on all ranks.

        Args:
            trainer: in `setup`.
            module: what is trained.
            folder: this fit's.
            reading: entered while Lightning reads the checkpoint.

        Raises:
            ResumeError: the checkpoint that `resume` names cannot be resumed from, or its global batch cannot be kept;
                or another callback contradicts `resume`.
        """
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        _require_no_contradiction(callbacks)
        self.checkpoint, given = None, given_checkpoint(trainer)
        if given is not None:
            if trainer.is_global_zero:
                log.warning("fit goes on from %s, as it was told; resume=%s is not asked.", given, self._resume)
        else:
            self.checkpoint = choose_together(self._resume, folder, trainer.global_rank, trainer.world_size)
        self.elastic = ElasticRestart(self.checkpoint, self._global_batch)
        self.elastic.setup(trainer, module, "fit")
        if self.checkpoint is not None:
            restore_from(trainer, str(self.checkpoint), reading)
        # A previous attempt may have logged steps that this one repeats, even if it left no checkpoint.
        job = read_job()
        restarted = self._resume in (AUTO, ANY) and job is not None and job.attempt > 0
        if given is None and (self.checkpoint is not None or restarted):
            for logger in trainer.loggers:
                if isinstance(logger, ContinuesRun):
                    logger.continue_run()


def searches_only(trainer: Trainer) -> bool:
    """Tell whether a fit is one of Lightning's Tuner, which searches for a setting and does not train."""
    return any(only_searches(each) for each in _finders(trainer.callbacks))  # type: ignore[attr-defined]


def _finders(callbacks: list[Callback]) -> list[LearningRateFinder | BatchSizeFinder]:
    return [each for each in callbacks if isinstance(each, (LearningRateFinder, BatchSizeFinder))]


def _require_no_contradiction(callbacks: list[Callback]) -> None:
    if any(isinstance(each, ElasticRestart) for each in callbacks):
        raise ResumeError(
            "There are JobCheckpoint(resume=...), which keeps the global batch itself, and an ElasticRestart. Leave "
            "the latter out; JobCheckpoint(resume=..., global_batch='change') is its other setting."
        )
    for each in _finders(callbacks):
        raise ResumeError(
            f"A fit with the callback {type(each).__name__} cannot be resumed: it would search again, from the "
            "checkpoint's weights, and Lightning would then forget the rest of the checkpoint. Search before the fit, "
            "with lightning.pytorch.tuner.Tuner(trainer), or leave `resume` out."
        )
