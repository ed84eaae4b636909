"""Checkpoints without a change of the script: each fit gets a JobCheckpoint, whose faults do not end the training."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from azureml_strategy.checkpoint.builtin_callbacks import callbacks_of
from azureml_strategy.checkpoint.fit_resume import FitResume, finders, searches_only, this_process
from azureml_strategy.checkpoint.job_checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.resume import ANY, AUTO, NEVER, ResumeError
from azureml_strategy.checkpoint.serialization import UnsavableStateError
from azureml_strategy.checkpoint.writer import Written
from azureml_strategy.cluster.environ import CHECKPOINT_SWITCH
from azureml_strategy.cluster.isolation import IsolatedCallback
from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.gather import Fault, RankFaultError, gather_sound
from azureml_strategy.interfaces import KnowsEarlierAttempts
from azureml_strategy.lightning_internals import checkpoint_io, restore_as_given, set_checkpoint_io

log = logging.getLogger(__name__)

WORDS = (AUTO, ANY, NEVER)
# As in the recipes.
_MINUTES = 15.0
_WITHOUT = f"Training goes on, and no checkpoint of ours is written. {CHECKPOINT_SWITCH}=off leaves them out."


class AutomaticCheckpoint(IsolatedCallback):
    """Gives each fit of a Trainer a `ForgivingCheckpoint`, and takes it away at the end.

    So the Trainer's list of callbacks is the script's own before and after. A fit gets none if it has a `JobCheckpoint`
    already, if its Trainer has `enable_checkpointing=False` or `fast_dev_run`, if it is one of Lightning's Tuner or
    searches by itself, or if one process of several trains alone. `resume` is `auto`, `any` or `never`.
    """

    switch = CHECKPOINT_SWITCH

    def __init__(self, resume: str) -> None:
        self._resume = resume
        self._process = this_process()  # a strategy may fork or spawn another for each fit

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._take_away(trainer)  # a fit that failed early may have left one
        if stage == "fit" and self._is_wanted(trainer):
            # Lightning iterates over this very list, and calls the `setup` of the new callback last.
            trainer.callbacks.append(ForgivingCheckpoint(self._resume, self._process))  # type: ignore[attr-defined]

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._take_away(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._take_away(trainer)

    def _is_wanted(self, trainer: Trainer) -> bool:
        savers = trainer.checkpoint_callbacks
        if not savers or any(isinstance(each, JobCheckpoint) for each in savers) or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return False
        alone = dist.is_available() and dist.is_initialized() and dist.get_world_size() != trainer.world_size
        if alone or searches_only(trainer):
            return False
        for each in finders(trainer):
            _warn(trainer, f"A fit with a {type(each).__name__} cannot be resumed. {_WITHOUT}")
            return False
        return True

    def _take_away(self, trainer: Trainer) -> None:
        """Make a new list, because Lightning may be iterating over the old one, whose callbacks must all be called."""
        if callbacks_of(trainer, ForgivingCheckpoint):
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
            trainer.callbacks = [each for each in callbacks if not isinstance(each, ForgivingCheckpoint)]  # type: ignore[attr-defined]


class RestartNotice(IsolatedCallback):
    """Warns in a restarted job that a fit begins at step 0, and says how to resume instead; once in a process.

    It does not warn if the script resumes by itself, or has a JobCheckpoint with `resume`.
    """

    switch = CHECKPOINT_SWITCH

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        job = read_job()
        if job is None or job.attempt == 0 or trainer.global_step > 0 or trainer.ckpt_path is not None:
            return
        savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, JobCheckpoint)]
        trial = trainer.fast_dev_run or searches_only(trainer)  # type: ignore[attr-defined]
        if trial or any(each.resumes for each in savers) or _noticed or not trainer.is_global_zero:
            return
        _noticed.append(job.attempt)
        by_variable = (
            f"{CHECKPOINT_SWITCH}=auto among the job's variables, or `azureml-strategy submit ... job.checkpoint=auto`"
            ", has each fit save to the job's output `run` and go on from there; so does"
        )
        log.warning(
            "This job has been started again (attempt %d), and this fit begins at step 0: what earlier attempts have "
            "trained is lost%s. %s JobCheckpoint(resume='auto'). %s=off leaves this line out.",
            job.attempt,
            _earlier_progress(trainer, job.attempt),
            "To go on from the newest checkpoint, give the script" if savers else by_variable,
            CHECKPOINT_SWITCH,
        )


# The attempts that `RestartNotice` has warned of in this process.
_noticed: list[int] = []


def _earlier_progress(trainer: Trainer, attempt: int) -> str:
    """How far the earlier attempts came, as far as the job's run knows."""
    for logger in trainer.loggers:
        if isinstance(logger, KnowsEarlierAttempts):
            stopped = logger.tag_at_start(f"stopped.attempt_{attempt - 1}")
            epoch = logger.metric_at_start("epoch")
            if stopped is not None:
                return f" (attempt {attempt - 1} stopped: {stopped})"
            if epoch is not None:
                return f" (the run has metrics up to epoch {epoch:g})"
    return ""


class ForgivingCheckpoint(JobCheckpoint):
    """A JobCheckpoint whose faults do not end the training: all ranks warn once, and go on without it.

    Checkpoints are written at intervals of time, when the ranks are stopped, and at the end of a fit; not after epochs,
    as the script's own ModelCheckpoint does. Nothing changes for the script: the checkpoints that it writes itself are
    Lightning's, and loggers do not learn of ours.

    Only a resume that fails ends the training. To begin anew would lose what this job has trained, and a half restored
    state must not be trained on. Other jobs' checkpoints are passed over, and damaged ones are left out.

    `process` is `this_process()` of the script, and by default of this process.
    """

    def __init__(self, resume: str, process: str | None = None) -> None:
        super().__init__(every_minutes=_MINUTES, every_n_epochs=0, resume=resume)
        self._fit_resume = FitResume(resume, skip_other_runs=True, process=process)
        self._given_up = False
        self._saving = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._on_all_ranks(trainer, partial(super().setup, trainer, pl_module, stage))

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._fit_resume is not None
        if self._fit_resume.checkpoint is not None and not self._given_up:
            super().on_fit_start(trainer, pl_module)  # a part of the resume
        else:
            self._on_all_ranks(trainer, partial(super().on_fit_start, trainer, pl_module))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._on_all_ranks(trainer, partial(super().on_train_start, trainer, pl_module))

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        if not self._given_up:
            super().on_step_boundary(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._on_all_ranks(trainer, partial(super().on_train_end, trainer, pl_module))

    @override
    def save_now(self, trainer: Trainer, reason: str) -> str | None:
        return None if self._given_up else super().save_now(trainer, reason)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._saving:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        assert self._fit_resume is not None
        if self._fit_resume.checkpoint is not None and str(self._fit_resume.checkpoint) == str(trainer.ckpt_path):
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    @override
    def _save(self, trainer: Trainer, reason: str) -> None:
        self._saving = True
        try:
            with _own_io(self, trainer.strategy):
                self._on_all_ranks(trainer, partial(super()._save, trainer, reason))
        finally:
            self._saving = False

    @override
    def _replace_checkpoint_io(self, strategy: Strategy) -> None:
        """Leave the strategy its own, which writes the script's checkpoints."""

    @override
    def _read_context(self, strategy: Strategy) -> AbstractContextManager[None]:
        return _own_io(self, strategy)

    @override
    def _adopt(self, trainer: Trainer, written: Written | None) -> None:
        if written is not None:
            self._last_checkpoint_saved = self.last_model_path = str(self._folder.path / written.manifest.name)

    def _on_all_ranks(self, trainer: Trainer, action: Callable[[], None]) -> None:
        """Act on all ranks. If any fails, all give up, with one warning.

        A rank that fails takes part in exactly one more gather, the one in which the others wait, within the action or
        after it.
        """
        if self._given_up:
            return
        own_fault: Fault | None = None
        try:
            action()
        except ResumeError:
            raise  # raised on all ranks, as the next ones are
        except (RankFaultError, UnsavableStateError) as known:
            self._give_up(trainer, str(known))
            return
        except Exception as fault:
            place = traceback.extract_tb(fault.__traceback__)[-1]
            own_fault = Fault(redact_text(f"{type(fault).__name__}: {fault} ({place.filename}:{place.lineno})"))
        try:
            gather_sound(own_fault)
        except RankFaultError as fault:
            self._give_up(trainer, str(fault))

    def _give_up(self, trainer: Trainer, why: str) -> None:
        self._given_up = True
        self._background.close()
        restore_as_given(trainer)
        _warn(trainer, f"This training cannot be kept in checkpoints. {why.rstrip('.')}. {_WITHOUT}")


@contextmanager
def _own_io(checkpoint: JobCheckpoint, strategy: Strategy) -> Iterator[None]:
    """Have the strategy write and read by our CheckpointIO inside the context, unless the user gave it one."""
    before = checkpoint_io(strategy)
    JobCheckpoint._replace_checkpoint_io(checkpoint, strategy)
    try:
        yield
    finally:
        set_checkpoint_io(strategy, before)


def _warn(trainer: Trainer, words: str) -> None:
    if trainer.is_global_zero:
        log.warning("%s", words)
