"""A store for one purpose on the control channel: keys of its own, calls with a limit, and waits that always end."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from azureml_strategy.control.channel import Channel, T, heartbeat_key

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.05
# Time between two checks by a waiting rank; and the time without a new heartbeat after which a rank counts as gone, so
# long because other code may hold the GIL for a while.
_ASK_SECONDS, _SILENCE_SECONDS = 1.0, 120.0
# Time for the last message, in case the store does not answer.
_CLOSE_SECONDS = 2.0


class StepError(RuntimeError):
    """A step failed on some rank. Raised on all ranks."""


class ExchangeError(StepError):
    """The ranks cannot go on, because one of them is silent or has lost its connection. Raised on all that wait."""


class ExchangeClosedError(RuntimeError):
    """The store is closed, because this process is about to end."""


class ControlStore:
    """A store for one purpose, such as the checkpoints of one fit, which all ranks share.

    Every wait ends: with the value; with the error that any rank has met, which is the same on all ranks; or when the
    rank that should write the value has sent no heartbeat for two minutes. After an error the store cannot be used to
    wait any more, because its ranks may be at different places.

    Args:
        channel: of this process.
        name: a prefix of the keys that nothing else uses.
        rank: this process's global rank.
        processes: `Channel.id` of all ranks, in the order of ranks.
        timeout_s: how long one call may take, in seconds.
        give_back: called in the end.
        errors: key of the error that ends the waits; by default below `name`.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        rank: int,
        processes: Sequence[str],
        timeout_s: float = 60.0,
        give_back: Callable[[], None] = lambda: None,
        errors: str | None = None,
    ) -> None:
        self.channel = channel
        self.rank = rank
        self.world_size = len(processes)
        self._name = name
        self._processes = processes
        self._timeout_s = timeout_s
        self._give_back = give_back
        self._errors = errors or f"{name}/error"
        self._closing = threading.Lock()
        self._closed = False
        self._over = threading.Event()
        self._error: str | None = None

    @property
    def broken(self) -> bool:
        """Whether an error on some rank has ended the waits."""
        return self._error is not None

    def part(self, name: str) -> ControlStore:
        """Return a store below this one, for a part of its purpose. It needs no `close`, and has the same error."""
        return ControlStore(
            self.channel,
            f"{self._name}/{name}",
            self.rank,
            self._processes,
            self._timeout_s,
            errors=self._errors,
        )

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._call(lambda store: store.set(self._key(key), value))

    def get(self, key: str) -> str | None:
        """Read a value; None if there is none yet."""
        return self.get_all([key])[key]

    def get_all(self, keys: Sequence[str]) -> dict[str, str | None]:
        """Read several values at once; None for each that is not there yet."""
        found = self._read([self._key(key) for key in keys])
        return dict(zip(keys, found, strict=True))

    def get_if_all(self, keys: Sequence[str]) -> list[str] | None:
        """Read several values if all are there. None if one is missing, which costs one call."""
        names = [self._key(key) for key in keys]

        def read(store: Store) -> list[str] | None:
            return [value.decode() for value in store.multi_get(names)] if store.check(names) else None

        return self._call(read) if names else []

    def set_first(self, key: str, value: str) -> str:
        """Write a value unless another rank was faster. Return the value that is there now."""
        return self._call(lambda store: store.compare_set(self._key(key), "", value)).decode()

    def set_for_sure(self, key: str, value: str) -> None:
        """Write a value unless another rank was faster; see `Channel.send_for_sure`."""
        self.channel.send_for_sure(self._key(key), value, _CLOSE_SECONDS)

    def delete(self, *keys: str) -> None:
        """Remove values."""

        def remove(store: Store) -> None:
            for key in keys:
                store.delete_key(self._key(key))

        self._call(remove)

    def wait(self, keys: Mapping[int, str]) -> dict[int, str]:
        """Wait for the value under the key that each rank writes, and return the values by rank.

        Raises:
            ExchangeError: an error on any rank, or silence of one of these ranks, has ended the wait.
            ExchangeClosedError: `close` has ended it.
            StoreLostError: the store cannot be reached.
        """
        pause, patience = _SHORTEST_PAUSE_SECONDS, Patience(self)
        while True:
            self.require_open()
            reason = patience.end(list(keys))  # before the values are read: what a rank wrote before it left counts
            if (values := self.get_if_all(list(keys.values()))) is not None:
                return dict(zip(keys, values, strict=True))
            if reason is not None:
                self.fail(reason)
            else:
                self.pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def require_open(self) -> None:
        """Raise what has ended the waits, if anything has."""
        if self._error is not None:
            raise ExchangeError(self._error)
        if self._over.is_set():
            raise ExchangeClosedError("this process ended before all ranks had written")

    def fail(self, error: str) -> str:
        """End the waits of all ranks with an error. Return the one that this rank met first, which its waits raise."""
        error = self._end(error)
        self.channel.send_for_sure(self._errors, error, _CLOSE_SECONDS)
        return error

    def error(self) -> str | None:
        """Return the error that some rank has met first; None if there is none."""
        return self._read([self._errors])[0]

    def heartbeats(self, ranks: Sequence[int]) -> list[str | None]:
        """Read how many heartbeats the processes of some ranks have sent; None for one that has sent none yet."""
        return self._read([heartbeat_key(self._processes[rank]) for rank in ranks])

    def close(self) -> None:
        """End this process's waits, tell the other ranks that it has left, and give the channel back."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._over.set()
        if self.world_size > 1:
            self.channel.send_for_sure(self._errors, self._error or f"rank {self.rank} has left", _CLOSE_SECONDS)
        self._give_back()

    def pause(self, seconds: float) -> bool:
        """Wait for a while. Return True at once when the waits have ended."""
        return self._over.wait(seconds)

    def _end(self, error: str) -> str:
        self._error = self._error or error
        self._over.set()
        return self._error

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"

    def _read(self, keys: Sequence[str]) -> list[str | None]:
        def read(store: Store) -> list[str | None]:
            # `multi_get` would wait for a missing key. `check` says whether all are there.
            if store.check(list(keys)):
                return [value.decode() for value in store.multi_get(list(keys))]
            there = [key for key in keys if store.check([key])] if len(keys) > 1 else []
            values = dict(zip(there, store.multi_get(there) if there else [], strict=True))
            return [values[key].decode() if key in values else None for key in keys]

        return self._call(read) if keys else []

    def _call(self, action: Callable[[Store], T]) -> T:
        return self.channel.call(action, self._timeout_s)


class Patience:
    """Decides when to stop waiting for ranks: after so many seconds without a new heartbeat, a rank counts as gone."""

    def __init__(self, store: ControlStore, seconds: float | None = None) -> None:
        self._store = store
        # Checks are counted, not seconds: a machine that was suspended for a while has not read in that time.
        self._most_in_vain = math.ceil((_SILENCE_SECONDS if seconds is None else seconds) / _ASK_SECONDS)
        self._asked_at = time.monotonic()
        self._heard: dict[int, str | None] = {}
        self._in_vain: dict[int, int] = {}

    def end(self, ranks: Sequence[int]) -> str | None:
        """Return why it is pointless to wait for these ranks, or None. It asks the store at most once a second."""
        if time.monotonic() < self._asked_at + _ASK_SECONDS:
            return None
        self._asked_at = time.monotonic()
        if (error := self._store.error()) is not None:
            return error
        return self._silence(ranks)

    def _silence(self, ranks: Sequence[int]) -> str | None:
        others = [rank for rank in ranks if rank != self._store.rank]
        for rank, heard in zip(others, self._store.heartbeats(others), strict=True):
            new = heard != self._heard.get(rank)
            self._in_vain[rank] = 0 if new else self._in_vain.get(rank, 0) + 1
            self._heard[rank] = heard
        silent = [rank for rank in others if self._in_vain[rank] >= self._most_in_vain]
        if not silent:
            return None
        return f"nothing has been heard of rank {silent[0]} for {_ASK_SECONDS * self._most_in_vain:.0f} s"
