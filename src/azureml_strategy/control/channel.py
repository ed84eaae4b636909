"""Connections to the rendezvous store, by which the processes of a job find one another."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.5  # between two attempts
_CONNECT_SECONDS = 5.0  # then the name is looked up again
_ANSWER_SECONDS = 10.0  # for a server that has many to answer
# A process may start several groups one after the other; the store may outlive each.
_rounds = itertools.count()

_T = TypeVar("_T")
_Calls: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


def open_store(launch: Launch, timeout: timedelta, purpose: str | None = None) -> Store:
    """The rendezvous store of the job: rank 0 serves it, and torch, which opens it again, shares the server.

    Args:
        launch: this process's place.
        timeout: how long to wait for rank 0.
        purpose: a name for what is kept in it, which nobody else uses; None where each process of a group opens it
            once.

    Raises:
        LaunchError: rank 0 cannot open it, or did not in time.
    """
    from torch.distributed import DistNetworkError, PrefixStore, TCPStore  # type: ignore[attr-defined]

    serves = launch.rank == 0 and not agent_serves_store()
    if not serves:
        _await_server(launch, timeout)
    try:
        store = TCPStore(
            launch.main_address,
            launch.main_port,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except DistNetworkError as error:
        raise LaunchError(
            f"Rank {launch.rank} cannot open the rendezvous at {launch.main_address}:{launch.main_port}: "
            f"{str(error).splitlines()[0]} If another process of node 0 has the port, set MASTER_PORT to a free one "
            "on all nodes."
        ) from error
    # torchrun's store may outlive the processes that it starts again
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"azureml_strategy/{attempt}/{next(_rounds) if purpose is None else purpose}", store)


def another_connection(world_size: int, timeout: timedelta) -> Store | None:
    """A further connection to the store of the process group that has started, for a thread of one's own.

    Calls on one connection wait for one another: a thread that shared torch's would stop at the main thread's.

    Args:
        world_size: number of ranks; one alone needs nothing but its own memory.
        timeout: how long a call may wait for a key.

    Returns:
        None where the group was not made with MASTER_ADDR and MASTER_PORT, or nothing answers there.
    """
    from torch.distributed import HashStore, TCPStore, is_initialized  # type: ignore[attr-defined]

    if world_size == 1:
        return HashStore()
    if not is_initialized():
        return None
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # The server has been there: one that refuses has ended, and torch would ask it again until the time is up.
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
        connecting = min(timeout, timedelta(seconds=_ANSWER_SECONDS))
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=connecting)
    except (KeyError, ValueError, OSError, RuntimeError):
        return None
    store.set_timeout(timeout)
    return store


def agent_serves_store() -> bool:
    """Whether torchrun's agent on node 0 serves the store of the process group; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _await_server(launch: Launch, timeout: timedelta) -> None:
    """Wait until the address answers: torch would fill the log with a stack trace of each attempt."""
    deadline, pause = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError):
            address = launch.main_address, launch.main_port
            socket.create_connection(address, timeout=min(left, _CONNECT_SECONDS)).close()
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    raise LaunchError(
        f"Rank {launch.rank} on {socket.gethostname()} found no rendezvous at {launch.main_address}:"
        f"{launch.main_port} within {timeout}: rank 0 (node 0) has not started, has failed, or cannot be reached. "
        "Look at rank 0's log (user_logs/std_log_process_0.txt), and see that MASTER_ADDR is an address of node 0 "
        "that the other nodes reach."
    )


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
