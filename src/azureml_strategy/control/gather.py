"""Exchange values between ranks: on their main threads by collectives, on other threads through the store."""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from typing_extensions import override

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.channel import Channel, StoreLostError, lease_channel
from azureml_strategy.control.messages import from_json, to_json
from azureml_strategy.control.store import ControlStore, ExchangeClosedError, ExchangeError, StepError

log = logging.getLogger(__name__)

Value = TypeVar("Value")
# How long rank 0, which serves the store, waits for the others' last calls, and its pause between two checks.
_LAST_READ_SECONDS, _LAST_READ_PAUSE = 5.0, 0.02


def gather(value: Any) -> list[Any]:
    """Gather the values of all ranks on all ranks, in the order of ranks. This is a collective."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


@dataclass(frozen=True)
class Fault:
    """What a rank gives to a gather in place of its value, because it has failed before; with the reason."""

    text: str


class RankFaultError(RuntimeError):
    """A rank has failed before a gather. Raised on all ranks."""


def gather_sound(value: Any) -> list[Any]:
    """Gather as `gather` does, but raise on all ranks if one of them gives a `Fault`.

    Raises:
        RankFaultError: a rank did.
    """
    gathered = gather(value)
    faults = [f"rank {rank}: {each.text}" for rank, each in enumerate(gathered) if isinstance(each, Fault)]
    if faults:
        raise RankFaultError(faults[0])
    return gathered


@dataclass(frozen=True)
class SharedStore(Generic[Value]):
    """A store that all ranks share, and what they gave one another when it was opened.

    Attributes:
        store: None if some rank has no connection.
        values: what each rank gave, in the order of ranks; None for a rank on which something failed before.
        unconnected: the ranks without a connection.
    """

    store: ControlStore | None
    values: list[Value | None]
    unconnected: list[int]


def open_shared_store(
    who: str, rank: int, world_size: int, value: Value | None, timeout_s: float = 60.0
) -> SharedStore[Value]:
    """Open a store that all ranks share, and exchange one value between them. This is a collective.

    Every rank must call it, whatever has failed there before. All get a store, or none does. Its keys are new, because
    the store's server may outlive a run, as torchrun's does, and then has a previous attempt's keys.

    Args:
        who: the class that calls it, for the error.
        rank: this process's global rank.
        world_size: number of ranks of this Trainer, which may run alone while a process group exists.
        value: what to give the other ranks.
        timeout_s: how long a call of the store may take, in seconds.

    Raises:
        RuntimeError: the collective has failed: another rank has ended, or is in another collective.
    """
    channel, give_back = _lease(world_size) or (None, lambda: None)
    own = channel.id if channel is not None else None, uuid.uuid4().hex, value
    try:
        ranks = [own] if world_size == 1 else _from_same_place(who, gather((who, own)))
    except RuntimeError:
        give_back()
        raise
    processes = [process for process, _, _ in ranks if process is not None]
    unconnected = [other for other, (process, _, _) in enumerate(ranks) if process is None]
    values = [each for _, _, each in ranks]
    if channel is None or unconnected:
        give_back()
        return SharedStore(None, values, unconnected)
    name = f"azureml_strategy/{ranks[0][1]}"
    return SharedStore(ControlStore(channel, name, rank, processes, timeout_s, give_back), values, unconnected)


def _from_same_place(who: str, gathered: list[Any]) -> list[Any]:
    """Return what each rank gave, if all ranks called the same collective.

    Raises:
        RuntimeError: a rank was in another collective at that moment.
    """
    elsewhere = [rank for rank, each in enumerate(gathered) if not isinstance(each, tuple) or each[0] != who]
    if elsewhere:
        raise RuntimeError(
            f"This rank has {who}, but rank {elsewhere[0]} has not, or not in the same place. The ranks wait for one "
            "another there: give the Trainers of all ranks the same callbacks in the same order."
        )
    return [own for _, own in gathered]


def _lease(world_size: int) -> tuple[Channel, Callable[[], None]] | None:
    try:
        return lease_channel(world_size)
    except Exception as error:  # the other ranks must not wait for this one, whatever has failed
        log.warning("No connection to the rendezvous store: %s: %s", type(error).__name__, error)
        return None


class Exchange(ABC):
    """Exchanges values between ranks. All ranks must call the same methods in the same order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Gather the values of all ranks on all ranks, in the order of ranks."""

    def leave(self) -> None:
        """Tell the other ranks that this rank will make no further calls."""
        return

    def on_all_ranks(self, step: Callable[[], Value]) -> list[Value]:
        """Run a step on each rank, and return its results in the order of ranks, on all of them.

        Raises:
            StepError: the step failed on at least one rank. The message gives the reason.
        """
        return self._results(_outcome(step, f"rank {self.rank}: "))

    def on_rank_zero(self, step: Callable[[], Value]) -> Value:
        """Run a step on rank 0, and return its result on all ranks.

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

    A rank waits for another as long as that one sends heartbeats, because a disk may be slow. A failure on one rank
    ends the waits of all ranks. Afterwards the exchange cannot be used any more. Nothing else uses the store.
    """

    def __init__(self, store: ControlStore) -> None:
        super().__init__(store.rank)
        self._store = store
        self._others = range(1, store.world_size)
        self._round = 0

    @property
    def broken(self) -> bool:
        """Whether an error on some rank has ended the exchange."""
        return self._store.broken

    @override
    def gather(self, value: Any) -> list[Any]:
        self._round += 1
        everything = f"{self._round}/all"
        with self.sharing_errors():
            if self.rank > 0:
                self._put(f"{self._round}/{self.rank}", value)
                answer: list[Any] = from_json(self._store.wait({0: everything})[0])
                return answer
            keys = {rank: f"{self._round}/{rank}" for rank in self._others}
            self._store.require_open()
            texts = self._store.wait(keys)
            gathered = [value, *(from_json(texts[rank]) for rank in self._others)]
            if self._others:
                self._put(everything, gathered)
                # All ranks have read the last answer. Otherwise they would not be in this round.
                self._store.delete(f"{self._round - 1}/all", *keys.values())
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
        except Exception as error:  # the others must not wait for this rank, whatever has failed
            text = redact_text(f"rank {self.rank}: {type(error).__name__}: {error}")
            raise ExchangeError(self._store.fail(text)) from error

    @override
    def leave(self) -> None:
        if self._store.broken or self._store.pause(0):
            return
        with suppress(StoreLostError):  # no other rank is left to talk to
            if self.rank > 0:
                self._store.set(f"left/{self._round}/{self.rank}", "")
                return
            # Rank 0 serves the store: the others must have left before it ends.
            keys = [f"left/{self._round}/{rank}" for rank in self._others]
            deadline = time.monotonic() + _LAST_READ_SECONDS
            while None in self._store.get_all(keys).values() and time.monotonic() < deadline:
                if self._store.pause(_LAST_READ_PAUSE):
                    break
            self._store.delete(*keys)

    def close(self) -> None:
        """End the exchange: this process's waits for other ranks fail, and so do their waits for this one."""
        self._store.close()

    def _put(self, key: str, value: Any) -> None:
        self._store.require_open()
        self._store.set(key, to_json(value))


def on_rank_zero(who: str, rank: int, world_size: int, step: Callable[[], Value]) -> Value:
    """Run a step on rank 0 that may take hours, while the other ranks wait; a collective.

    A collective would end the others' wait after the time limit of the process group, 30 minutes by default. Here they
    wait for as long as rank 0 sends heartbeats, and a failure on rank 0 ends their waits at once. Only ranks without a
    common store wait in a collective. The step's result is returned on all ranks.

    Args:
        who: the class that calls it, for the error.
        rank: this process's global rank.
        world_size: number of ranks of this Trainer.
        step: called on rank 0 alone.

    Raises:
        StepError: the step failed, or rank 0 is gone; on all ranks. With one process it is the step's own error.
        RuntimeError: a rank was in another collective.
    """
    if world_size == 1:
        return step()
    store = open_shared_store(who, rank, world_size, None).store
    if store is None:
        return GroupExchange(rank).on_rank_zero(step)
    exchange = StoreExchange(store)
    try:
        value = exchange.on_rank_zero(step)
        exchange.leave()
    finally:
        exchange.close()
    return value


def _outcome(step: Callable[[], Value], who: str) -> tuple[Value | None, str | None]:
    try:
        return step(), None
    except StepError as error:
        return None, str(error)  # it names the rank
    except Exception as error:  # the others must not wait for this rank, whatever has failed
        kind = "" if isinstance(error, (OSError, RuntimeError)) else f"{type(error).__name__}: "
        return None, f"{who}{kind}{error}"
