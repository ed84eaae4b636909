"""Tracks where Lightning's loops and the data loaders are, and puts a resumed fit back there."""

from __future__ import annotations

import copy
import itertools
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeGuard

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from typing_extensions import override

from azureml_strategy.checkpoint.random_state import RandomState, find_generators, random_state, set_random_state
from azureml_strategy.checkpoint.resume import ResumeError
from azureml_strategy.interfaces import ActsBetweenSteps
from azureml_strategy.lightning_internals import (
    BEFORE_FETCH,
    LOAD_LOADER_STATES,
    DataFetcher,
    PrefetchDataFetcher,
    Stateful,
    accumulates,
    begins_shorter_anew,
    data_fetcher,
    ended_once,
    load_loader_states,
    loader_iterators,
    loader_states,
    make_iterators,
    reload_epoch,
    set_reload_epoch,
    set_restarting,
    set_resuming,
    stop_workers,
    take_loader_states,
    training_loaders,
)

log = logging.getLogger(__name__)

# Key of the random state from before the iterators of an epoch were made. Making them draws random numbers.
_BEGIN = -1
# Reading at least this many batches again is logged, to explain the delay.
_MANY_BATCHES = 50


class _RecordsItsEnd(Iterator[Any]):
    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.ended = False

    @override
    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self.ended = True
            raise


def watch_ends(loaders: CombinedLoader) -> None:
    """Record from now on which iterators end. Call it once for the iterators of an epoch."""
    iterators = loader_iterators(loaders) or []
    if len(iterators) > 1 and not begins_shorter_anew(loaders):  # otherwise Lightning records it
        iterators[:] = [_RecordsItsEnd(each) for each in iterators]


def ended(loaders: CombinedLoader) -> list[bool]:
    """Whether each loader has ended in this epoch."""
    if begins_shorter_anew(loaders):
        return list(ended_once(loaders))
    return [isinstance(each, _RecordsItsEnd) and each.ended for each in loader_iterators(loaders) or ()]


def end_again(loaders: CombinedLoader, ended: Sequence[bool]) -> None:
    """Mark the new iterators as ended whose loaders had ended when the checkpoint was written."""
    iterators = loader_iterators(loaders) or []
    for index, has_ended in enumerate(ended):
        if not has_ended:
            continue
        if begins_shorter_anew(loaders):
            ended_once(loaders)[index] = True
        else:
            iterators[index] = iter(())


class DataPosition:
    """Remembers how to return to the same batch of the same epoch.

    Loaders with `state_dict` and `load_state_dict` are asked for their state. All others are read again from the
    beginning of the epoch. Before that, the random generators are set back to where they were when the iterators were
    made and when the first batch was read, so that samplers, worker processes and random transforms draw the same.

    If a loader has no length, Lightning reads one batch ahead. The states and random numbers are then those from before
    that batch, so that it is read again.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._marks: dict[int, RandomState] = {}
        self._last: tuple[int, RandomState, list[int]] | None = None
        self._states: list[dict[str, Any]] | None = None
        self._ended: list[bool] = []
        self._saved: dict[str, Any] | None = None
        self._replayed: dict[int, RandomState] | None = None
        self._may_read_again = True

    def begin_pass(self) -> None:
        """Note that new iterators are about to be made."""
        self._marks, self._last, self._states = {_BEGIN: self._random_state()}, None, None

    def iterators_made(self) -> None:
        """Note that the iterators of the epoch are made."""
        if training_loaders(self._trainer) is not None:
            watch_ends(self._loaders)

    def before_fetch(self) -> None:
        """Note that a batch is about to be read."""
        fetcher = data_fetcher(self._trainer)
        assert fetcher is not None
        number = fetcher.fetched
        if self._replayed is not None:
            if number in self._replayed:
                set_random_state(self._replayed[number], self._generators())
            return
        if number == 0:
            self._marks[0] = self._random_state()
        self._keep_mark_of_new_iterators()
        may_restart = begins_shorter_anew(self._loaders) and len(self._loaders.flattened) > 1
        if self._reads_ahead(fetcher) or may_restart:
            self._last = (number, self._random_state(), self._iterators())
        if self._reads_ahead(fetcher) and self._all_stateful():
            self._states = copy.deepcopy(loader_states(self._loaders))
            self._ended = ended(self._loaders)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to return to the next batch. Call it between two steps."""
        if training_loaders(self._trainer) is None:
            return {"marks": [], "loaders": None, "ended": [], "reloaded": None}
        at_end = ended(self._loaders)
        loaders = loader_states(self._loaders) if self._all_stateful() else None
        epoch: Any = self._trainer.fit_loop.epoch_progress.current
        marks = {}
        if epoch.processed < epoch.started:
            self._keep_mark_of_new_iterators()
            marks = dict(self._marks)
            fetcher = data_fetcher(self._trainer)
            if self._last is not None and fetcher is not None and self._reads_ahead(fetcher):
                marks[self._last[0]] = self._last[1]
                loaders, at_end = (self._states, self._ended) if loaders is not None else (None, [])
        reloaded = reload_epoch(self._trainer)
        return {"marks": list(marks.items()), "loaders": loaders, "ended": at_end, "reloaded": reloaded}

    def load_state_dict(self, state: dict[str, Any] | None, read_again: bool) -> None:
        """Set the position of this rank that `seek` goes to; None if another number of ranks wrote the checkpoint.

        With `read_again`, a loader that cannot restore its position is read again up to there.
        """
        self._saved, self._may_read_again = state, read_again

    def seek(self, fetcher: DataFetcher, batches: int) -> None:
        """Make the next batch the one that was next when the checkpoint was written, after `batches` of the epoch.

        Nothing that counts has been read from the fetcher yet.

        Raises:
            ResumeError: the batches would have to be read again, and `load_state_dict` forbade it.
        """
        saved, self._saved = self._saved, None
        self._marks = dict(saved["marks"]) if saved is not None else {}
        # Of another number of ranks, only rank 0's states are known, from Lightning's own entry of the checkpoint.
        states = saved["loaders"] if saved is not None else take_loader_states(self._trainer) or None
        self._loaders.reset()  # ends worker processes that have started with other random numbers
        if _BEGIN in self._marks:
            set_random_state(self._marks[_BEGIN], self._generators())
        if states is not None and self._all_stateful():
            self._replayed = {0: self._marks[batches]} if batches in self._marks else {}
            load_loader_states(self._loaders, states)
            at_end = saved.get("ended", []) if saved is not None else []
            make_iterators(fetcher, lambda: end_again(self._loaders, at_end))
            fetcher.fetched += batches
        else:
            self._replayed = self._marks
            iter(fetcher)
            self._read_again(fetcher, batches)
        self._replayed = None

    def begin_epoch(self) -> None:
        """Restore the loaders' states before the first epoch of a run that resumes at the beginning of an epoch.

        A stream may continue across the ends of epochs.
        """
        saved = self._saved
        if saved is None or saved["reloaded"] is None:
            return
        set_reload_epoch(self._trainer, saved["reloaded"])
        if saved["loaders"] and self._all_stateful():
            for loader in self._loaders.flattened:
                stop_workers(loader)
            load_loader_states(self._loaders, saved["loaders"])

    def restart_ended(self, fetcher: DataFetcher) -> None:
        """Restart new iterators that have ended already, because they would yield nothing."""
        saved, self._saved = self._saved, None
        if saved is None or not saved["loaders"] or not self._all_stateful():
            return
        if self._reads_ahead(fetcher):
            if not fetcher.batches:
                iter(fetcher)
            return
        iterators = loader_iterators(self._loaders)
        assert iterators is not None
        for index, iterator in enumerate(iterators):
            first = list(itertools.islice(iterator, 1))
            iterators[index] = itertools.chain(first, iterator) if first else iter(self._loaders.flattened[index])

    @property
    def _loaders(self) -> CombinedLoader:
        loaders = training_loaders(self._trainer)
        assert loaders is not None
        return loaders

    def _read_again(self, fetcher: DataFetcher, batches: int) -> None:
        if not self._may_read_again:
            raise ResumeError(
                f"The checkpoint was taken after {batches} batches of an epoch, and the data loader does not know its "
                "place. Give it state_dict and load_state_dict, as azureml_strategy.data.ResumableLoader has them; or "
                "let it be read again, `read_again=True` (checkpoint.read_again=true); or go on from a checkpoint of "
                "an epoch's end, `resume=PATH`."
            )
        started, is_logged = time.monotonic(), batches >= _MANY_BATCHES and self._trainer.is_global_zero
        if is_logged:
            log.warning(
                "Reading the %d batches of the interrupted epoch again: the data loader does not know its place. One "
                "with state_dict and load_state_dict does, such as azureml_strategy.data.ResumableLoader.",
                batches,
            )
        for _ in range(batches):
            next(fetcher)
        if is_logged:
            log.warning("Read %d batches again in %.0f s.", batches, time.monotonic() - started)

    def _keep_mark_of_new_iterators(self) -> None:
        """Keep the random state from before a shorter loader restarted within the epoch, for which it draws numbers."""
        if self._last is not None and self._last[2] != self._iterators():
            self._marks[self._last[0]] = self._last[1]

    def _iterators(self) -> list[int]:
        return [id(each) for each in loader_iterators(self._loaders) or ()]

    def _reads_ahead(self, fetcher: DataFetcher) -> TypeGuard[PrefetchDataFetcher]:
        return isinstance(fetcher, PrefetchDataFetcher) and fetcher.length is None

    def _all_stateful(self) -> bool:
        return all(isinstance(each, Stateful) for each in self._loaders.flattened)

    def _random_state(self) -> RandomState:
        return random_state(self._generators())

    def _generators(self) -> dict[str, Any]:
        loaders = training_loaders(self._trainer)
        return find_generators({"loaders": loaders.flattened if loaders is not None else []})


class FitLoopState:
    """Calls callbacks between steps, and puts a resumed fit loop where the checkpoint was written.

    Lightning has no hook for either, so this wraps some methods of the Trainer's two loops. Get it by `of`.

    Attributes:
        data: the position in the training data.
        between_steps: whether callbacks are being called now, so that a checkpoint is complete.
        ends: whether they are called after the last step, so that the end of the training is next.
    """

    _of_trainers: ClassVar[weakref.WeakKeyDictionary[Trainer, FitLoopState]] = weakref.WeakKeyDictionary()

    def __init__(self, trainer: Trainer) -> None:
        self._ref = weakref.ref(trainer)  # weak, because the trainer's loops refer to this object
        self.data = DataPosition(weakref.proxy(trainer))
        self._restore: Callable[[bool], None] | None = None
        self._within_epoch = False
        self._started = False
        self._steps = 0
        self.between_steps = self.ends = False
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        _wrap(fit, "run", self._run)
        _wrap(fit, LOAD_LOADER_STATES, self._load_loader_states)
        _wrap(fit, "on_run_start", self._on_run_start)
        _wrap(fit, "on_advance_end", self._on_epoch_done)
        _wrap(epoch, "reset", self._reset)
        _wrap(epoch, "on_run_start", self._on_epoch_run_start)
        _wrap(epoch, BEFORE_FETCH, self._on_before_fetch)
        _wrap(epoch, "on_advance_end", self._on_batch_done)

    @property
    def _trainer(self) -> Any:  # Any: Lightning's annotations lack the callbacks and the loops' counters
        trainer = self._ref()
        assert trainer is not None
        return trainer

    @classmethod
    def of(cls, trainer: Trainer) -> FitLoopState:
        """Return the state of this Trainer. The first call makes it, before `fit` begins to train."""
        if trainer not in cls._of_trainers:
            cls._of_trainers[trainer] = cls(trainer)
        return cls._of_trainers[trainer]

    def forget(self) -> None:
        """Resume nothing. The state that a failed `fit` was to resume from does not belong to the next one."""
        self._restore = None

    def resume(self, data: dict[str, Any] | None, restore: Callable[[bool], None], read_again: bool) -> None:
        """Make the next `fit_loop.run` begin between the two steps where the checkpoint was written.

        Args:
            data, read_again: see `DataPosition.load_state_dict`.
            restore: called last before the next step, to restore what hooks have changed meanwhile. Its argument tells
                whether that step is not the first of its epoch.
        """
        self.data.load_state_dict(data, read_again)
        self._restore = restore

    def _run(self, run: Callable[[], None]) -> None:
        """Wrap `_FitLoop.run`. If the training is complete, call its last hooks again: they may swap weights."""
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
        """Tell Lightning whether an epoch is under way, which it would otherwise guess.

        With `max_steps`, Lightning assumes that a Trainer is always within an epoch, and then reads another batch.
        """
        fit = self._trainer.fit_loop
        epoch, batches = fit.epoch_progress, fit.epoch_loop.batch_progress
        if epoch.current.processed < epoch.current.started and batches.is_last_batch:
            epoch.increment_processed()  # another number of ranks has no whole batch of this epoch left
        for progress in (epoch.total, epoch.current):
            progress.completed = progress.processed
        self._within_epoch = epoch.current.processed < epoch.current.started
        set_restarting(self._trainer, self._within_epoch)
        # Otherwise Lightning would use the iterators that were made before the random numbers were restored.
        set_resuming(self._trainer, self._within_epoch)

    def _load_loader_states(self, load: Callable[[], None]) -> None:
        """Wrap `_FitLoop._load_combined_loader_states`, which runs right before the first iterators are made."""
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
            if self._restore is not None:  # this class takes care of what Lightning warns of
                warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
            reset()

    def _on_epoch_run_start(self, on_run_start: Callable[[DataFetcher], None], fetcher: DataFetcher) -> None:
        """Wrap `_TrainingEpochLoop.on_run_start`, which makes new iterators in all epochs but the first."""
        resumes, self._restore = self._restore, None
        fit = self._trainer.fit_loop
        if resumes is None or not self._within_epoch:
            if self._trainer.current_epoch > 0 and not fit.is_resuming and not fit.epoch_loop.restarting:
                self.data.begin_pass()
            on_run_start(fetcher)
            if resumes is not None:
                self.data.restart_ended(fetcher)
            self.data.iterators_made()
            return
        on_run_start(fetcher)
        self.data.seek(fetcher, fit.epoch_loop.batch_progress.current.ready)
        self.data.iterators_made()
        # Lightning has done all it does for loops that restart. If they stayed marked, it would look for a validation
        # to finish, and at the end of this epoch skip schedulers that follow a metric.
        set_restarting(self._trainer, False)
        self._within_epoch = False
        resumes(True)

    def _on_before_fetch(self, on_before_fetch: Callable[[], None]) -> None:
        on_before_fetch()
        self.data.before_fetch()

    def _on_batch_done(self, on_advance_end: Callable[[DataFetcher], None], fetcher: DataFetcher) -> None:
        on_advance_end(fetcher)
        stepped = self._trainer.global_step != self._steps
        self._steps = self._trainer.global_step
        if not self._trainer.fit_loop.epoch_loop.done and not accumulating(self._trainer, stepped):
            self._call_callbacks()

    def _on_epoch_done(self, on_advance_end: Callable[[], None]) -> None:
        on_advance_end()
        if accumulating(self._trainer, stepped=True):
            return
        # The epoch still counts as the current one: for callbacks, for checkpoint names, and for stock Lightning if it
        # resumes from such a checkpoint.
        progress = self._trainer.fit_loop.epoch_progress
        for each in (progress.total, progress.current):
            each.completed -= 1
        self.ends = _is_over(self._trainer)
        try:
            self._call_callbacks()
        finally:
            self.ends = False
            for each in (progress.total, progress.current):
                each.completed += 1

    def _call_callbacks(self) -> None:
        self.between_steps = True
        try:
            for callback in self._trainer.callbacks:
                if isinstance(callback, ActsBetweenSteps):
                    callback.on_step_boundary(self._trainer)
        finally:
            self.between_steps = False


def _is_over(trainer: Any) -> bool:
    """Whether Lightning ends the training at this end of an epoch. Its own `done` would print a line."""
    fit, steps = trainer.fit_loop, trainer.global_step
    epochs = fit.epoch_progress.current.processed
    by_epochs = fit.max_epochs not in (None, -1) and epochs >= fit.max_epochs
    by_steps = fit.max_steps != -1 and steps >= fit.max_steps
    may_stop = epochs >= (fit.min_epochs or 0) and steps >= (fit.min_steps or 0)
    return by_epochs or by_steps or bool(trainer.should_stop and may_stop)


def accumulating(trainer: Trainer, stepped: bool) -> bool:
    """Whether gradients wait for further batches, at the end of a batch.

    If a module optimizes manually, only `stepped`, an optimizer's step in that batch, may show whether it accumulates.
    """
    engine = getattr(trainer.strategy, "deepspeed_engine", None)
    if engine is not None:  # DeepSpeed keeps counting across epochs, Lightning restarts
        return bool(engine.micro_steps % engine.gradient_accumulation_steps())
    return accumulates(trainer) or not (trainer.lightning_module.automatic_optimization or stepped)


def _wrap(owner: Any, name: str, wrapper: Callable[..., None]) -> None:
    wrapped = getattr(owner, name)
    setattr(owner, name, lambda *arguments: wrapper(wrapped, *arguments))
