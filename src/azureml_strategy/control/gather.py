"""Lets ranks write one checkpoint together: on their main threads by collectives, or on threads through the store."""

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
# How long rank 0, which serves the store, waits for the others' last calls, and its pause between two checks.
_LAST_READ_SECONDS, _LAST_READ_PAUSE = 5.0, 0.02
# Time between two heartbeats, time between two checks by a waiting rank, and the number of checks without a new
# heartbeat (two minutes) after which a rank counts as gone. So many, because other code may hold the GIL for a while.
_HEARTBEAT_SECONDS, _ASK_SECONDS, _MOST_IN_VAIN = 5.0, 1.0, 120
# Time for the last message, in case the store does not answer.
_CLOSE_SECONDS = 2.0


def gather(value: Any) -> list[Any]:
    """Gather the values of all ranks on all ranks, in the order of ranks. This is a collective."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


class StepError(RuntimeError):
    """A step failed on some rank. Raised on all ranks."""


class ExchangeError(StepError):
    """The ranks cannot go on, because one of them is silent or lost its connection. Raised on all that wait."""


class ExchangeClosedError(RuntimeError):
    """The exchange is closed, because this process is about to end."""


class Exchange(ABC):
    """Exchanges values between ranks. All ranks must call the same methods in the same order.

    Args:
        rank: this process's global rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Gather the values of all ranks on all ranks, in the order of ranks."""

    def leave(self) -> None:
        """Tell the other ranks that this rank will make no further calls."""
        return

    def together(self, step: Callable[[], Value]) -> list[Value]:
        """Run a step on each rank.

        Returns:
            What the step returned on each rank, in the order of ranks; the same on all ranks.

        Raises:
            StepError: the step failed on at least one rank. The message gives the reason.
        """
        return self._results(_outcome(step, f"rank {self.rank}: "))

    def on_rank_zero(self, step: Callable[[], Value]) -> Value:
        """Run a step on rank 0.

        Returns:
            What the step returned, on all ranks.

        Raises:
            StepError: the step failed. The message gives the reason.
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
    """Exchanges values on the main threads, by collectives of the training's process group."""

    @override
    def gather(self, value: Any) -> list[Any]:
        return gather(value)


class StoreExchange(Exchange):
    """Exchanges values on background threads through the rendezvous store.

    Collectives on these threads would mix with those of the training. Values travel as JSON (`messages`): anyone who
    reaches the store's port can write into it, and loading a pickle runs code.

    A rank waits for another as long as that one sends heartbeats, because a disk may be slow. A failure on one rank,
    such as a lost connection, ends the waits of all ranks. Afterwards the exchange cannot be used any more.

    Args:
        store: a connection of its own, to keys that nobody else uses.
        rank: this process's global rank.
        world_size: number of ranks.
        connect: opens another connection to the same keys, to tell the other ranks that the first one is lost. It
            returns None if it cannot.
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
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="checkpoint-exchange", daemon=True)
        if world_size > 1:
            self._heartbeats.start()

    @property
    def broken(self) -> bool:
        """Whether an error on some rank has ended the exchange."""
        return self._error is not None

    @override
    def gather(self, value: Any) -> list[Any]:
        self._round += 1
        everything = f"{self._round}/all"
        with self.sharing_errors():
            if self.rank > 0:
                self._put(f"{self._round}/{self.rank}", value)
                gathered: list[Any] = self._take(everything, of=0)
                return gathered
            gathered = [value, *(self._take(f"{self._round}/{rank}", of=rank) for rank in self._others)]
            if self._others:
                self._put(everything, gathered)
                self._store.delete_key(f"{self._round - 1}/all")  # all have read it, or they would not be in this round
            return gathered

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """End the exchange on all ranks if the code inside fails with an error that the other ranks do not know.

        Raises:
            ExchangeError: replaces an error of this rank alone, and has its text.
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
        with suppress(RuntimeError):  # from the store: no other rank is left to talk to
            if self.rank > 0:
                self._store.set(f"left/{self._round}/{self.rank}", "")
            else:
                self._wait_for_others([f"left/{self._round}/{rank}" for rank in self._others])

    def close(self) -> None:
        """End the exchange: this process's waits for other ranks fail, and so do their waits for this one."""
        self._over.set()
        if self._heartbeats.ident is not None:
            self._heartbeats.join(_CLOSE_SECONDS)

    def _send_heartbeats(self) -> None:
        """Send a heartbeat every few seconds, and a last message at the end."""
        count = 0
        with suppress(ExchangeError), self.sharing_errors():
            while not self._over.is_set():
                count += 1
                self._store.set(f"beat/{self.rank}", str(count))
                self._over.wait(_HEARTBEAT_SECONDS)
        self._publish_error()

    def _wait_for_others(self, keys: list[str]) -> None:
        """Wait until the other ranks have left, because rank 0 serves the store."""
        deadline = time.monotonic() + _LAST_READ_SECONDS
        while not self._store.check(keys) and time.monotonic() < deadline and not self._over.wait(_LAST_READ_PAUSE):
            continue
        for key in keys:
            self._store.delete_key(key)

    def _put(self, key: str, value: Any) -> None:
        self._require_open()
        self._store.set(key, to_json(value))

    def _take(self, key: str, of: int) -> Any:
        """Poll for a value. A wait inside the store could not be interrupted.

        Args:
            key: its key.
            of: the rank that writes it. Rank 0's value is for all ranks, so it is not deleted here.
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
        """End the exchange on this rank and on the others. Return the first error, which is the one reported."""
        self._error = self._error or error
        self._over.set()
        return self._error

    def _publish_error(self) -> None:
        """Write why this rank ends, unless another rank was faster.

        An error is written through another connection if this one is lost.
        """
        word = self._error or f"rank {self.rank} has left"
        try:
            self._store.compare_set("error", "", word)
        except RuntimeError:
            other = self._connect() if self._error is not None else None
            if other is not None:
                with suppress(RuntimeError):
                    other.compare_set("error", "", word)


class _Patience:
    """Decides when to stop waiting for a rank.

    Args:
        store: where the rank writes its heartbeats.
        rank: the rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._asked_at = time.monotonic()
        self._heard = b""
        self._in_vain = 0

    def end(self) -> str | None:
        """Return why waiting is pointless, or None. Asks the store at most once a second."""
        if time.monotonic() < self._asked_at + _ASK_SECONDS:
            return None
        self._asked_at = time.monotonic()
        if self._store.check(["error"]):
            return self._store.get("error").decode()
        heartbeat = f"beat/{self._rank}"
        heard = self._store.get(heartbeat) if self._store.check([heartbeat]) else b""
        # Counts checks, not seconds: a machine that was suspended for a while has not listened in that time.
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
        return None, str(error)  # it names the rank
    except Exception as error:  # whatever it is, the others must not wait for this rank
        kind = "" if isinstance(error, (OSError, RuntimeError)) else f"{type(error).__name__}: "
        return None, f"{who}{kind}{error}"
