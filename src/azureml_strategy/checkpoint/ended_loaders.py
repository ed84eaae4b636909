"""Which of several training loaders have been read to their end in this epoch, while a longer one goes on.

A loader's own state need not tell: some begin anew where they are asked again. Lightning ends an epoch, or gives None
in the place of a batch, by what it has seen since it made the iterators, and a new process has seen nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from typing_extensions import override

from azureml_strategy.lightning_internals import begins_shorter_anew, ended_once, loader_iterators


class _NotesItsEnd(Iterator[Any]):
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
        iterators[:] = [_NotesItsEnd(each) for each in iterators]


def ended(loaders: CombinedLoader) -> list[bool]:
    """Tell of each loader whether it has come to its end in this epoch."""
    if begins_shorter_anew(loaders):
        return list(ended_once(loaders))
    return [isinstance(each, _NotesItsEnd) and each.ended for each in loader_iterators(loaders) or ()]


def end_again(loaders: CombinedLoader, ended: Sequence[bool]) -> None:
    """Let the iterators that were made anew count as ended where those of the checkpoint had."""
    iterators = loader_iterators(loaders) or []
    for index in (index for index, each in enumerate(ended) if each):
        if begins_shorter_anew(loaders):
            ended_once(loaders)[index] = True
        else:
            iterators[index] = iter(())
