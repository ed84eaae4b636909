"""The place of a training in its data, for loaders that know it themselves and for those that do not."""

from __future__ import annotations

import copy
import itertools
import logging
import time
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _shutdown_workers_and_reset_iterator

from azureml_strategy.checkpoint.random_state import RandomState, find_generators, random_state, set_random_state
from azureml_strategy.checkpoint.resume import ResumeError

log = logging.getLogger(__name__)

# Where a pass through the data begins: before its iterators are made, which draw random numbers.
_BEGIN = -1
# From so many batches on, a person wants to know what takes so long.
_MANY_BATCHES = 50


class DataPosition:
    """Remembers what it takes to stand again at the same batch of the same epoch.

    Loaders with `state_dict` and `load_state_dict` are asked. All others are read once more from the beginning of the
    epoch, after the random numbers have been put back to where they were when the iterators were made and when the
    first batch was read: samplers, worker processes and random transforms then draw the same.

    Where the loader has no length, Lightning reads one batch ahead. States and random numbers are then those before
    that batch, so that it comes again.

    Args:
        trainer: whose loaders for training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._marks: dict[int, RandomState] = {}
        self._last: tuple[int, RandomState, list[int]] | None = None
        self._states: list[dict[str, Any]] | None = None
        self._saved: dict[str, Any] | None = None
        self._replayed: dict[int, RandomState] | None = None
        self._may_read_again = True

    def begin_pass(self) -> None:
        """New iterators are about to be made."""
        self._marks, self._last, self._states = {_BEGIN: self._random_state()}, None, None

    def before_fetch(self) -> None:
        """A batch is about to be read."""
        fetcher = self._trainer.fit_loop._data_fetcher
        assert fetcher is not None
        number = fetcher.fetched
        if self._replayed is not None:
            if number in self._replayed:
                set_random_state(self._replayed[number], self._generators())
            return
        if number == 0:
            self._marks[0] = self._random_state()
        self._keep_mark_of_new_iterators()
        if self._reads_ahead(fetcher) or self._may_begin_again():
            self._last = (number, self._random_state(), self._iterators())
        if self._reads_ahead(fetcher) and self._all_stateful():
            self._states = copy.deepcopy(self._loaders._state_dicts())

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to come back to the batch that is next, between two steps."""
        fit = self._trainer.fit_loop
        if fit._combined_loader is None:
            return {"marks": [], "loaders": None, "reloaded": None}
        loaders = self._loaders._state_dicts() if self._all_stateful() else None
        epoch: Any = fit.epoch_progress.current
        marks = {}
        if epoch.processed < epoch.started:
            self._keep_mark_of_new_iterators()
            marks = dict(self._marks)
            if self._last is not None and fit._data_fetcher is not None and self._reads_ahead(fit._data_fetcher):
                marks[self._last[0]] = self._last[1]
                loaders = self._states if loaders is not None else None
        return {"marks": list(marks.items()), "loaders": loaders, "reloaded": fit._last_train_dl_reload_epoch}

    def load_state_dict(self, state: dict[str, Any] | None, read_again: bool) -> None:
        """Where `go_to` is to go.

        Args:
            state: this rank's; None where there were other ranks.
            read_again: whether what was read before is read again where a loader does not know its place.
        """
        self._saved, self._may_read_again = state, read_again

    def go_to(self, fetcher: _DataFetcher, batches: int) -> None:
        """Have the next batch be the one that was next when the checkpoint was taken.

        Args:
            fetcher: Lightning's, of which nothing was read yet that counts.
            batches: of the epoch that were read before.

        Raises:
            ResumeError: they would have to be read again, which `load_state_dict` was told not to do.
        """
        saved, self._saved = self._saved, None
        self._marks = dict(saved["marks"]) if saved is not None else {}
        states = saved["loaders"] if saved is not None else self._states_of_lightning()
        self._loaders.reset()  # ends workers that have begun with other random numbers
        if _BEGIN in self._marks:
            set_random_state(self._marks[_BEGIN], self._generators())
        if states is not None and self._all_stateful():
            self._replayed = {0: self._marks[batches]} if batches in self._marks else {}
            self._loaders._load_state_dicts(states)
            iter(fetcher)
            fetcher.fetched += batches
        else:
            self._replayed = self._marks
            iter(fetcher)
            self._read_again(fetcher, batches)
        self._replayed = None

    def begin_epoch(self) -> None:
        """Before the first epoch of a resumed run, at whose beginning the checkpoint was taken.

        Loaders get their states: a stream may go on over the ends of epochs.
        """
        saved = self._saved
        if saved is None or saved["reloaded"] is None:
            return
        self._trainer.fit_loop._last_train_dl_reload_epoch = saved["reloaded"]
        if saved["loaders"] and self._all_stateful():
            for loader in self._loaders.flattened:
                _shutdown_workers_and_reset_iterator(loader)
            self._loaders._load_state_dicts(saved["loaders"])

    def leave_end(self, fetcher: _DataFetcher) -> None:
        """Once the iterators of that epoch are made: those of loaders that stood at their end give nothing."""
        saved, self._saved = self._saved, None
        if saved is None or not saved["loaders"] or not self._all_stateful():
            return
        if isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None:
            if not fetcher.batches:
                iter(fetcher)
            return
        assert self._loaders._iterator is not None
        iterators = self._loaders._iterator.iterators
        for index, iterator in enumerate(iterators):
            first = list(itertools.islice(iterator, 1))
            iterators[index] = itertools.chain(first, iterator) if first else iter(self._loaders.flattened[index])

    @property
    def _loaders(self) -> CombinedLoader:
        loaders = self._trainer.fit_loop._combined_loader
        assert loaders is not None
        return loaders

    def _read_again(self, fetcher: _DataFetcher, batches: int) -> None:
        if not self._may_read_again:
            raise ResumeError(
                f"The checkpoint was taken after {batches} batches of an epoch, and the data loader does not know its "
                "place. Give it state_dict and load_state_dict, as azureml_strategy.data.ResumableLoader has them; or "
                "let it be read again, `read_again=True` (checkpoint.read_again=true); or go on from a checkpoint of "
                "an epoch's end, `resume=PATH`."
            )
        started = time.monotonic()
        if batches >= _MANY_BATCHES and self._trainer.is_global_zero:
            log.warning(
                "Reading the %d batches of the interrupted epoch again: the data loader does not know its place. One "
                "with state_dict and load_state_dict does, such as azureml_strategy.data.ResumableLoader.",
                batches,
            )
        for _ in range(batches):
            next(fetcher)
        if batches >= _MANY_BATCHES and self._trainer.is_global_zero:
            log.warning("Read %d batches again in %.0f s.", batches, time.monotonic() - started)

    def _states_of_lightning(self) -> list[dict[str, Any]] | None:
        """Rank 0's, from Lightning's own entry of the checkpoint: what it has of another number of ranks."""
        states = self._trainer.fit_loop._combined_loader_states_to_load
        self._trainer.fit_loop._combined_loader_states_to_load = []
        return states or None

    def _keep_mark_of_new_iterators(self) -> None:
        """A loader that is shorter than another one begins again in the middle of the epoch, and draws for it."""
        if self._last is not None and self._last[2] != self._iterators():
            self._marks[self._last[0]] = self._last[1]

    def _iterators(self) -> list[int]:
        iterator = self._loaders._iterator
        return [id(each) for each in iterator.iterators] if iterator is not None else []

    def _may_begin_again(self) -> bool:
        return self._loaders._mode == "max_size_cycle" and len(self._loaders.flattened) > 1

    def _reads_ahead(self, fetcher: _DataFetcher) -> bool:
        return isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None

    def _all_stateful(self) -> bool:
        return all(isinstance(each, _Stateful) for each in self._loaders.flattened)

    def _random_state(self) -> RandomState:
        return random_state(self._generators())

    def _generators(self) -> dict[str, Any]:
        loaders = self._trainer.fit_loop._combined_loader
        return find_generators({"loaders": loaders.flattened if loaders is not None else []})
