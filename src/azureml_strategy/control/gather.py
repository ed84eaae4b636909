"""How ranks work on one checkpoint together: on their main threads, or behind the training."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from typing_extensions import override

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.messages import from_json, to_json

Value = TypeVar("Value")
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.05
# How long rank 0, which serves the store, stays for the others' last question.
_FAREWELL_SECONDS, _FAREWELL_PAUSE = 5.0, 0.02
# A sign of life of each rank, and how often one that waits asks for it: in vain for two minutes means that it is gone,
# as other code may hold Python's lock for a while.
_BEAT_SECONDS, _ASK_SECONDS, _MOST_IN_VAIN = 5.0, 1.0, 120
# For the last word, where the store may not answer.
_CLOSE_SECONDS = 2.0


def gather(value: Any) -> list[Any]:
    """What each rank gave, by rank and on all of them; a collective."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


class StepError(RuntimeError):
    """A step that failed on some rank; raised on all of them."""


class ExchangeError(StepError):
    """The ranks cannot go on, as one of them can no longer be heard; raised on all that wait."""


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

    Values are told as JSON (`messages`): the store is open to whoever reaches its port, and a pickle would run code.

    A rank waits for another as long as that lives, as a slow disk may take its time. What ends a rank's part, such as
    a connection that is lost, ends the waits of all; then nobody uses this exchange any more.

    Args:
        store: a connection of its own, with names that nobody else uses.
        rank: this process's global rank.
        world_size: number of ranks.
        connect: opens another connection to the same names, to tell the others that the first is lost; None if it
            cannot.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, connect: Callable[[], Store | None] = lambda: None
    ) -> None:
        super().__init__(rank)
        self._store = store
        self._connect = connect
        self._others = range(1, world_size)
        self._round = 0
        self._over = threading.Event()
        self._error: str | None = None
        self._living = threading.Thread(target=self._live, name="checkpoint-exchange", daemon=True)
        if world_size > 1:
            self._living.start()

    @property
    def broken(self) -> bool:
        """Whether an error of some rank has ended it."""
        return self._error is not None

    @override
    def gather(self, value: Any) -> list[Any]:
        self._round += 1
        everything = f"{self._round}/all"
        with self.telling():
            if self.rank > 0:
                self._put(f"{self._round}/{self.rank}", value)
                gathered: list[Any] = self._take(everything, of=0)
                return gathered
            gathered = [value, *(self._take(f"{self._round}/{rank}", of=rank) for rank in self._others)]
            if self._others:
                self._put(everything, gathered)
                self._store.delete_key(f"{self._round - 1}/all")  # read by all, or they would not have come this far
            return gathered

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Have any end of this thread's part that the others cannot know of end theirs as well.

        Raises:
            ExchangeError: in place of an error of this rank alone, with its text.
        """
        try:
            yield
        except (StepError, ExchangeClosedError):
            raise
        except Exception as error:  # whatever it is, the others must not wait for this rank
            raise ExchangeError(self._end(redact_text(f"rank {self.rank}: {type(error).__name__}: {error}"))) from error

    @override
    def leave(self) -> None:
        if self._over.is_set():
            return
        with suppress(RuntimeError):  # of the store: there is nobody left to talk to
            if self.rank > 0:
                self._store.set(f"left/{self._round}/{self.rank}", "")
            else:
                self._see_off([f"left/{self._round}/{rank}" for rank in self._others])

    def close(self) -> None:
        """Have whatever waits for another rank fail, and what other ranks wait for from this one."""
        self._over.set()
        if self._living.ident is not None:
            self._living.join(_CLOSE_SECONDS)

    def _live(self) -> None:
        """Give a sign of life every few seconds, and at the end a last word."""
        count = 0
        with suppress(ExchangeError), self.telling():
            while not self._over.is_set():
                count += 1
                self._store.set(f"beat/{self.rank}", str(count))
                self._over.wait(_BEAT_SECONDS)
        self._say_last_word()

    def _see_off(self, keys: list[str]) -> None:
        """Rank 0 serves the store: stay for the others' last question."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while not self._store.check(keys) and time.monotonic() < deadline and not self._over.wait(_FAREWELL_PAUSE):
            continue
        for key in keys:
            self._store.delete_key(key)

    def _put(self, key: str, value: Any) -> None:
        self._require_open()
        self._store.set(key, to_json(value))

    def _take(self, key: str, of: int) -> Any:
        """Wait for a value; not inside the store, which cannot be interrupted.

        Args:
            key: its name.
            of: the rank that gives it; rank 0's is for all, and stays.
        """
        pause, patience = _SHORTEST_PAUSE_SECONDS, _Patience(self._store, of)
        while not self._store.check([key]):
            if reason := patience.end():
                self._end(reason)
            self._over.wait(pause)
            self._require_open()
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        value = from_json(self._store.get(key))
        if of > 0:
            self._store.delete_key(key)
        return value

    def _require_open(self) -> None:
        if self._error is not None:
            raise ExchangeError(self._error)
        if self._over.is_set():
            raise ExchangeClosedError("this process ended before all ranks had written")

    def _end(self, error: str) -> str:
        """Stop, and have the others stop as well; the error that counts."""
        self._error = self._error or error
        self._over.set()
        return self._error

    def _say_last_word(self) -> None:
        """By this connection, or, for an error, by another where that is lost; the first one's of all counts."""
        word = self._error or f"rank {self.rank} has left"
        try:
            self._store.compare_set("error", "", word)
        except RuntimeError:
            other = self._connect() if self._error is not None else None
            if other is not None:
                with suppress(RuntimeError):
                    other.compare_set("error", "", word)


class _Patience:
    """With a rank that others wait for.

    Args:
        store: where its signs of life are.
        rank: which.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._asked_at = time.monotonic()
        self._heard = b""
        self._in_vain = 0

    def end(self) -> str | None:
        """Why there is nothing to wait for any more; asks the store once a second at the most."""
        if time.monotonic() < self._asked_at + _ASK_SECONDS:
            return None
        self._asked_at = time.monotonic()
        if self._store.check(["error"]):
            return self._store.get("error").decode()
        beat = f"beat/{self._rank}"
        heard = self._store.get(beat) if self._store.check([beat]) else b""
        # counted, as a machine that stands still for a while does not hear anything either
        self._in_vain = self._in_vain + 1 if heard == self._heard else 0
        self._heard = heard
        silent = self._in_vain >= _MOST_IN_VAIN
        return (
            f"nothing has been heard of rank {self._rank} for {_ASK_SECONDS * _MOST_IN_VAIN:.0f} s" if silent else None
        )


def _outcome(step: Callable[[], Value], who: str) -> tuple[Value | None, str | None]:
    try:
        return step(), None
    except StepError as error:
        return None, str(error)  # it says who
    except Exception as error:  # whatever it is, the others must not wait for this rank
        kind = "" if isinstance(error, (OSError, RuntimeError)) else f"{type(error).__name__}: "
        return None, f"{who}{kind}{error}"
