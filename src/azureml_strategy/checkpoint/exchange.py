"""How ranks work on one checkpoint together: on their main threads, or behind the training."""

from __future__ import annotations

import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]
from typing_extensions import override

from azureml_strategy.checkpoint.random_state import gather

Value = TypeVar("Value")
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.05
# How long rank 0, which serves the store, stays for the others' last question.
_FAREWELL_SECONDS = 5.0


class StepError(RuntimeError):
    """A step that failed on some rank; raised on all of them."""


class ExchangeClosedError(RuntimeError):
    """The ranks no longer talk: this process is about to end."""


class Exchange(ABC):
    """What ranks tell one another; each method is called by all of them, in the same order.

    Args:
        rank: this process's global rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, by rank and on all of them."""

    def leave(self) -> None:
        """Say that nothing else will be asked."""
        return

    def together(self, step: Callable[[], Value]) -> list[Value]:
        """Take a step on each rank.

        Returns:
            What it returned, by rank and on all of them.

        Raises:
            StepError: it failed on at least one rank, and why.
        """
        return self._results(_outcome(step, f"rank {self.rank}: "))

    def on_rank_zero(self, step: Callable[[], Value]) -> Value:
        """Take a step on rank 0.

        Returns:
            What it returned, on all ranks.

        Raises:
            StepError: it failed, and why.
        """
        value: Value = self._results(_outcome(step, "") if self.rank == 0 else (None, None))[0]
        return value

    def _results(self, own: tuple[Any, str | None]) -> list[Any]:
        outcomes = self.gather(own)
        errors = [error for _, error in outcomes if error is not None]
        if errors:
            raise StepError(errors[0])
        return [value for value, _ in outcomes]


class GroupExchange(Exchange):
    """By collectives of the training's process group, for the main threads."""

    @override
    def gather(self, value: Any) -> list[Any]:
        return gather(value)


class StoreExchange(Exchange):
    """Through the rendezvous store, for threads: collectives of theirs would mix with those of the training.

    Args:
        store: a connection of its own, with names that nobody else uses.
        rank: this process's global rank.
        world_size: number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        super().__init__(rank)
        self._store = store
        self._others = range(1, world_size)
        self._round = 0
        self._closed = threading.Event()

    @override
    def gather(self, value: Any) -> list[Any]:
        self._round += 1
        everything = f"{self._round}/all"
        if self.rank > 0:
            self._put(f"{self._round}/{self.rank}", value)
            gathered: list[Any] = self._take(everything)
            return gathered
        gathered = [value, *(self._take(f"{self._round}/{rank}", last=True) for rank in self._others)]
        if self._others:
            self._put(everything, gathered)
            self._store.delete_key(f"{self._round - 1}/all")  # read by all, or they would not have come this far
        return gathered

    @override
    def leave(self) -> None:
        if self.rank > 0:
            self._put(f"left/{self._round}/{self.rank}", None)
            return
        deadline = time.monotonic() + _FAREWELL_SECONDS
        with suppress(ExchangeClosedError):
            for rank in self._others:
                self._take(f"left/{self._round}/{rank}", last=True, deadline=deadline)

    def close(self) -> None:
        """Have whatever waits for another rank fail."""
        self._closed.set()

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type] # torch's annotation forgets bytes

    def _take(self, key: str, last: bool = False, deadline: float = float("inf")) -> Any:
        """Wait for a value; not inside the store, which cannot be interrupted."""
        pause = _SHORTEST_PAUSE_SECONDS
        while not self._store.check([key]):
            if self._closed.wait(pause) or time.monotonic() > deadline:
                raise ExchangeClosedError("this process ended before all ranks had written")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        value = pickle.loads(self._store.get(key))
        if last:
            self._store.delete_key(key)
        return value


def _outcome(step: Callable[[], Value], who: str) -> tuple[Value | None, str | None]:
    try:
        return step(), None
    except StepError as error:
        return None, str(error)  # it says who
    except Exception as error:  # whatever it is, the others must not wait for this rank
        kind = "" if isinstance(error, (OSError, RuntimeError)) else f"{type(error).__name__}: "
        return None, f"{who}{kind}{error}"
