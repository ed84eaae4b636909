"""Which of several training loaders have been read to their end in this epoch, while a longer one goes on.

A loader's own state need not say so: some start again when they are asked for a further batch. Lightning ends an epoch,
or gives None in the place of a batch, by the ends it has noted since it made the iterators. A new process has no notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from typing_extensions import override

from azureml_strategy.lightning_internals import begins_shorter_anew, ended_once, loader_iterators


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
    """Note from now on which iterators come to their end. Call it once for those of an epoch."""
    iterators = loader_iterators(loaders) or []
    if len(iterators) > 1 and not begins_shorter_anew(loaders):  # else Lightning notes it itself
        iterators[:] = [_RecordsItsEnd(each) for each in iterators]


def ended(loaders: CombinedLoader) -> list[bool]:
    """Tell of each loader whether it has come to its end in this epoch."""
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
