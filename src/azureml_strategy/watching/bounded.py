"""The rendezvous store, asked in bounded time: its server may be a process that has stopped."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeAlias, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

_T = TypeVar("_T")
_Calls: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


def within(seconds: float, action: Callable[[], _T]) -> _T | None:
    """What an action returns; None if it does not in time, and is left behind, or fails.

    Args:
        seconds: how long to wait.
        action: what may take for ever.
    """
    found: list[_T] = []
    thread = threading.Thread(target=lambda: found.append(action()), name="hang-watch-waits", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


class StoreLostError(Exception):
    """The server cannot be asked any more.

    Args:
        silent: whether it has not answered in time; else its connection has ended.
    """

    def __init__(self, silent: bool) -> None:
        super().__init__("the rendezvous store does not answer" if silent else "the rendezvous store has ended")
        self.silent = silent


class BoundedStore:
    """Makes each call on a thread of its own, and gives up on it after a while: most calls of a store have no limit.

    Args:
        store: used by nobody else.
        timeout_s: how long a call may take, in seconds.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._start(store)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> str | None:
        """Read a value; None where there is none yet."""
        return self.get_all([key])[key]

    def get_all(self, keys: Sequence[str]) -> dict[str, str | None]:
        """Read several values at once."""
        found: dict[str, str | None] = self._call(lambda: self._read(keys)) if keys else {}
        return found

    def set_first(self, key: str, value: str) -> str:
        """Write a value unless somebody was faster; the value that is there now."""
        return str(self._call(lambda: self._store.compare_set(key, "", value)).decode())

    def add(self, key: str) -> int:
        """Count one up; the new count."""
        return int(self._call(lambda: self._store.add(key, 1)))

    def renew(self, store: Store) -> None:
        """Go on with another connection.

        Args:
            store: the same names, used by nobody else.
        """
        self.close()
        self._start(store)

    def close(self) -> None:
        """Let the thread end; one that waits for a server that is gone is left behind."""
        self._calls.put(None)

    def _start(self, store: Store) -> None:
        self._store = store
        self._calls: _Calls = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name="hang-watch-store", daemon=True).start()

    def _read(self, keys: Sequence[str]) -> dict[str, str | None]:
        # A key that is missing would hold up the whole question.
        there = keys if self._store.check(list(keys)) else [key for key in keys if self._store.check([key])]
        values = self._store.multi_get(list(there)) if there else []
        found = {key: value.decode() for key, value in zip(there, values, strict=True)}
        return {key: found.get(key) for key in keys}

    def _call(self, action: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._calls.put((future, action))
        try:
            return future.result(self._timeout_s)
        except (RuntimeError, FutureTimeoutError) as error:
            raise StoreLostError(silent=isinstance(error, FutureTimeoutError)) from error


def _work(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        future, action = call
        try:
            future.set_result(action())
        except Exception as error:
            future.set_exception(error)
