"""The fit loop of a Trainer: where it can be left without a trace, and how it is put back there.

Lightning calls its checkpoint callbacks in the middle of a step: the module's own `on_train_batch_end` and
`on_validation_end`, schedulers that follow a metric, and the loggers come after them. What a checkpoint of that moment
lacks, a resumed run lacks for good. So here a checkpoint is taken *between* two steps, when Lightning has done all that
belongs to the first, and a resumed run begins exactly there, past what Lightning would do once more.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities import rank_zero_info

from azureml_strategy.checkpoint.data_position import DataPosition


@runtime_checkable
class ActsBetweenSteps(Protocol):
    """A callback that is asked between two steps."""

    def on_step_boundary(self, trainer: Trainer) -> None:
        """All that belongs to the last step is done: hooks, validation, schedulers, logs; on all ranks alike.

        After the last batch of an epoch it is called once the epoch's end is done as well. `trainer.current_epoch` is
        still the epoch of the last step. Between batches whose gradients are accumulated it is not called.

        Args:
            trainer: in training.
        """
        ...


class FitLoopState:
    """Asks callbacks between steps, and puts a resumed fit loop where the checkpoint was taken.

    Lightning has no hook for either, so that some methods of this Trainer's two loops are wrapped.

    Args:
        trainer: whose loops; use `FitLoopState.of`.

    Attributes:
        data: the place in the training data.
        between_steps: whether callbacks are being asked now, so that a checkpoint is whole.
    """

    _of_trainers: ClassVar[weakref.WeakKeyDictionary[Trainer, FitLoopState]] = weakref.WeakKeyDictionary()

    def __init__(self, trainer: Trainer) -> None:
        self._ref = weakref.ref(trainer)  # which has this, by its loops
        self.data = DataPosition(weakref.proxy(trainer))
        self._restore: Callable[[bool], None] | None = None
        self._within_epoch = False
        self._started = False
        self._steps = 0
        self.between_steps = False
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        _wrap(fit, "run", self._run)
        _wrap(fit, "_load_combined_loader_states", self._load_loader_states)
        _wrap(fit, "on_run_start", self._on_run_start)
        _wrap(fit, "on_advance_end", self._on_epoch_done)
        _wrap(epoch, "reset", self._reset)
        _wrap(epoch, "on_run_start", self._on_epoch_run_start)
        _wrap(epoch, "_on_before_fetch", self._on_before_fetch)
        _wrap(epoch, "on_advance_end", self._on_batch_done)

    @property
    def _trainer(self) -> Any:  # Lightning's annotations lack its callbacks and the counters that loops use
        trainer = self._ref()
        assert trainer is not None
        return trainer

    @classmethod
    def of(cls, trainer: Trainer) -> FitLoopState:
        """The one of this Trainer; made at the first call, before its `fit` has begun to train."""
        if trainer not in cls._of_trainers:
            cls._of_trainers[trainer] = cls(trainer)
        return cls._of_trainers[trainer]

    def forget(self) -> None:
        """Nothing is resumed: what a `fit` that failed on its way was to go on from is not the next one's."""
        self._restore = None

    def resume(self, data: dict[str, Any] | None, restore: Callable[[bool], None], read_again: bool) -> None:
        """Have the next `fit_loop.run` begin between the two steps where the checkpoint was taken.

        Args:
            data: this rank's `DataPosition.state_dict`; None where it is of another number of ranks.
            restore: called last before the next step, to put back what hooks have changed meanwhile; with whether that
                step is not the first of an epoch.
            read_again: whether loaders that do not know their place are read again up to it.
        """
        self.data.load_state_dict(data, read_again)
        self._restore = restore

    def _run(self, run: Callable[[], None]) -> None:
        """`_FitLoop.run`. A training that is complete ends as it did: hooks at its end may swap weights."""
        resumes, self._started, self._within_epoch = self._restore is not None, False, False
        self._steps = self._trainer.global_step
        if resumes:
            self._correct_progress()
        try:
            run()
            if resumes and not self._started and self._trainer.limit_train_batches:
                rank_zero_info(
                    "The training of this checkpoint is complete: no step is left to train. To train on, raise "
                    "max_epochs; and max_steps, where there is one: an epoch that it has cut short counts as one."
                )
                self._trainer.fit_loop.on_run_start()
                self._trainer.fit_loop.on_run_end()
        finally:
            self._restore = None

    def _correct_progress(self) -> None:
        """Say what Lightning guesses: whether an epoch is under way.

        It takes a Trainer with `max_steps` for one that is always within an epoch, and then reads another batch.
        """
        fit = self._trainer.fit_loop
        epoch, batches = fit.epoch_progress, fit.epoch_loop.batch_progress
        if epoch.current.processed < epoch.current.started and batches.is_last_batch:
            epoch.increment_processed()  # with other ranks now, no whole batch of the epoch is left
        for progress in (epoch.total, epoch.current):
            progress.completed = progress.processed
        self._within_epoch = epoch.current.processed < epoch.current.started
        _set_restarting(fit, self._within_epoch)
        # Else the iterators that were made before the random numbers were restored would be used.
        fit._resuming_from_checkpoint = self._within_epoch

    def _load_loader_states(self, load: Callable[[], None]) -> None:
        """`_FitLoop._load_combined_loader_states`, right before the iterators are made for the first time."""
        if self._restore is None:
            load()
        self.data.begin_pass()

    def _on_run_start(self, on_run_start: Callable[[], None]) -> None:
        self._started = True
        on_run_start()
        if self._restore is not None and not self._within_epoch:
            self.data.begin_epoch()
            self._restore(False)

    def _reset(self, reset: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            if self._restore is not None:  # then what it warns of is seen to
                warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
            reset()

    def _on_epoch_run_start(self, on_run_start: Callable[[_DataFetcher], None], fetcher: _DataFetcher) -> None:
        """`_TrainingEpochLoop.on_run_start`, which makes new iterators in all epochs but the first."""
        resumes, self._restore = self._restore, None
        fit = self._trainer.fit_loop
        if resumes is None or not self._within_epoch:
            if self._trainer.current_epoch > 0 and not fit.is_resuming and not fit.epoch_loop.restarting:
                self.data.begin_pass()
            on_run_start(fetcher)
            if resumes is not None:
                self.data.leave_end(fetcher)
            return
        on_run_start(fetcher)
        self.data.go_to(fetcher, fit.epoch_loop.batch_progress.current.ready)
        # All that Lightning does for loops that restart is done. It would look for a validation to finish, and leave
        # out schedulers that follow a metric at the end of this epoch.
        _set_restarting(fit, False)
        self._within_epoch = False
        resumes(True)

    def _on_before_fetch(self, on_before_fetch: Callable[[], None]) -> None:
        on_before_fetch()
        self.data.before_fetch()

    def _on_batch_done(self, on_advance_end: Callable[[_DataFetcher], None], fetcher: _DataFetcher) -> None:
        on_advance_end(fetcher)
        stepped = self._trainer.global_step != self._steps
        self._steps = self._trainer.global_step
        if not self._trainer.fit_loop.epoch_loop.done and not accumulating(self._trainer, stepped):
            self._ask()

    def _on_epoch_done(self, on_advance_end: Callable[[], None]) -> None:
        on_advance_end()
        if accumulating(self._trainer, stepped=True):
            return
        # Callbacks, names of checkpoints and stock Lightning, should it resume from one, count this epoch as the
        # present one until it is over.
        progress = self._trainer.fit_loop.epoch_progress
        for each in (progress.total, progress.current):
            each.completed -= 1
        try:
            self._ask()
        finally:
            for each in (progress.total, progress.current):
                each.completed += 1

    def _ask(self) -> None:
        self.between_steps = True
        try:
            for callback in self._trainer.callbacks:
                if isinstance(callback, ActsBetweenSteps):
                    callback.on_step_boundary(self._trainer)
        finally:
            self.between_steps = False


def accumulating(trainer: Trainer, stepped: bool) -> bool:
    """Whether gradients wait for further batches, at the end of one.

    Args:
        trainer: in training.
        stepped: whether an optimizer has stepped in the last batch. A module that optimizes manually may accumulate
            in a way that only this shows.
    """
    engine = getattr(trainer.strategy, "deepspeed_engine", None)
    if engine is not None:  # counts on over the ends of epochs, where Lightning begins anew
        return bool(engine.micro_steps % engine.gradient_accumulation_steps())
    return trainer.fit_loop._should_accumulate() or not (trainer.lightning_module.automatic_optimization or stepped)


def _set_restarting(fit_loop: _FitLoop, restarting: bool) -> None:
    """Past _FitLoop's own setter, which knows better where there is `max_steps`."""
    _Loop.restarting.fset(fit_loop, restarting)  # type: ignore[attr-defined]


def _wrap(owner: Any, name: str, wrapper: Callable[..., None]) -> None:
    wrapped = getattr(owner, name)
    setattr(owner, name, lambda *arguments: wrapper(wrapped, *arguments))
