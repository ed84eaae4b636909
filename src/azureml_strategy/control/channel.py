"""The control channel: one connection of this process to the rendezvous store, and the one thread that uses it.

All messages between ranks outside of collectives go through it: heartbeats, the agreement to stop, the stop
barrier, checkpoints that background threads write together, and the hang watch's alarms.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from azureml_strategy.control.rendezvous import another_connection

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
# torch's own limit for a key that is missing. No call of ours waits for one.
_STORE_TIMEOUT = timedelta(seconds=60)
# Time to open another connection in place of one whose server does not answer.
_CONNECT_SECONDS = 12.0
# How long the interpreter's end waits for calls under way. A server that is gone may never answer.
_EXIT_SECONDS = 3.0
_FOLDER = "azureml_strategy/channel"

T = TypeVar("T")
# The workers and threads that call torch, see `_end_calls`.
_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def within(seconds: float, action: Callable[[], T]) -> T | None:
    """Run an action on a thread for so many seconds, and return its result.

    It is None if the action failed or takes too long. Its thread is then left behind.
    """
    found: list[T] = []
    thread = _start_thread(lambda: found.append(action()), "bounded-call")
    thread.join(seconds)
    return found[0] if found else None


class StoreLostError(Exception):
    """The server of the store cannot be reached. It is silent if it has not answered in time, else it has ended."""

    def __init__(self, silent: bool) -> None:
        super().__init__("the rendezvous store does not answer" if silent else "the rendezvous store has ended")
        self.silent = silent


class Channel:
    """One connection to the rendezvous store, and the one thread that uses it.

    Most calls of torch's stores have no time limit, and calls on one connection wait for one another. Here each call
    has a limit. A connection that has ended, or whose server does not answer, is replaced once, and the call is made
    again. So a call must do no harm if it is made twice: it may set a value, but not add to a counter.

    The thread also sends this process's heartbeats, and makes the calls that are due at intervals.

    Args:
        store: a connection that nobody else uses.
        connect: opens another connection to the same store; returns None if it cannot.

    Attributes:
        id: a name that no other process has, nor any earlier one. It is in the key of this process's heartbeats.
    """

    def __init__(self, store: Store, connect: Callable[[], Store | None] = lambda: None) -> None:
        self.id = uuid.uuid4().hex
        self._connect = connect
        self._closed = False
        self._replacing = threading.Lock()
        self._due: dict[Callable[[], None], tuple[float, float]] = {}  # interval, and when it is due next
        self._unsent: dict[str, str] = {}
        self._heartbeats = 0
        self._worker = _Worker(store, connect, self._due)
        self.every(HEARTBEAT_SECONDS, self._send_heartbeat)

    def call(self, action: Callable[[Store], T], timeout_s: float) -> T:
        """Make a call on the connection.

        The action must not wait for keys, because all other calls wait for it. If another connection must be opened, it
        may take twice the time limit and some seconds.

        Raises:
            StoreLostError: the store cannot be reached.
        """
        worker = self._worker
        if threading.get_ident() == worker.ident:  # a call that is due at intervals makes others
            return worker.perform(action)
        try:
            return worker.ask(action, timeout_s)
        except FutureTimeoutError as error:
            if not self._is_replaced(worker):
                raise StoreLostError(silent=True) from error
        try:
            return self._worker.ask(action, timeout_s)
        except FutureTimeoutError as error:
            raise StoreLostError(silent=True) from error

    def every(self, seconds: float, action: Callable[[], None]) -> None:
        """Call something at intervals on the thread, from now on and until `no_more`.

        Another call of this method changes the interval. The action may use `call`. If the store is lost, it is called
        again later.
        """
        self._due[action] = (seconds, time.monotonic())
        self._worker.wake()

    def no_more(self, action: Callable[[], None]) -> None:
        """End the calls that `every` has begun."""
        self._due.pop(action, None)

    def send_for_sure(self, key: str, value: str, timeout_s: float) -> None:
        """Write a value unless there is one already; if the store cannot be reached, before the next heartbeat.

        So the other ranks see either the value or no more heartbeats, and never wait in vain.
        """
        self._unsent[key] = value
        try:
            self.call(self._send_unsent, timeout_s)
        except StoreLostError as error:
            log.debug("%s waits to be sent: %s", key, error)

    def close(self) -> None:
        """Let the thread end. If it waits for a server that is gone, leave it behind."""
        self._closed = True
        self._due.clear()
        self._worker.close()

    def _send_heartbeat(self) -> None:
        self._heartbeats += 1
        count = str(self._heartbeats)

        def send(store: Store) -> None:
            self._send_unsent(store)
            store.set(heartbeat_key(self.id), count)

        self.call(send, _CONNECT_SECONDS)

    def _send_unsent(self, store: Store) -> None:
        for key, value in list(self._unsent.items()):
            store.compare_set(key, "", value)
            self._unsent.pop(key, None)

    def _is_replaced(self, silent: _Worker) -> bool:
        """Replace a connection whose server has not answered. Its thread is left behind."""
        with self._replacing:
            if self._worker is not silent:
                return True  # another thread has replaced it
            store = None if self._closed else within(_CONNECT_SECONDS, self._connect)
            if store is None:
                return False
            silent.close()
            self._worker = _Worker(store, self._connect, self._due)
            return True


class _Worker:
    """A connection and the thread that uses it. The table of what is due at intervals is shared with the channel."""

    def __init__(
        self,
        store: Store,
        connect: Callable[[], Store | None],
        due: dict[Callable[[], None], tuple[float, float]],
    ) -> None:
        self._store: Store | None = store
        self._connect = connect
        self._due = due
        self._closed = False
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None] = queue.SimpleQueue()
        self._thread = _start_thread(self._run, "control-channel")
        _workers.add(self)

    @property
    def ident(self) -> int | None:
        """The thread's `threading.get_ident`."""
        return self._thread.ident

    def ask(self, action: Callable[[Store], T], timeout_s: float) -> T:
        """Have the thread make a call, and return its result; see `Channel.call`."""
        if self._closed:
            raise StoreLostError(silent=False)
        future: Future[T] = Future()
        self._calls.put((future, action))
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            future.cancel()  # a server that answers later must not get a call that nobody waits for
            raise

    def perform(self, action: Callable[[Store], T]) -> T:
        """Make a call on this thread, once more on another connection if this one has ended."""
        if self._store is not None:
            with suppress(RuntimeError):  # the connection has ended
                return action(self._store)
        # The old connection is not tried again, because torch would log a stack trace each time.
        self._store = None if self._closed else self._connect()
        if self._store is None:
            raise StoreLostError(silent=False)
        try:
            return action(self._store)
        except RuntimeError as error:
            raise StoreLostError(silent=False) from error

    def wake(self) -> None:
        """See what is due."""
        self._calls.put(None)

    def close(self) -> None:
        """Let the thread end after the calls that it has been asked for."""
        self._closed = True
        self.wake()

    def _run(self) -> None:
        while not self._closed:
            self._make_due_calls()
            self._answer(self._next_due_s())
        while not self._calls.empty():
            self._answer(0)

    def _answer(self, timeout_s: float | None) -> None:
        try:
            asked = self._calls.get(timeout=timeout_s)
        except queue.Empty:
            return
        if asked is None:
            return
        future, action = asked
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self.perform(action))
        except Exception as error:  # it belongs to the thread that asked
            future.set_exception(error)

    def _next_due_s(self) -> float | None:
        times = [at for _, at in list(self._due.values())]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _make_due_calls(self) -> None:
        for action, (seconds, at) in list(self._due.items()):
            if time.monotonic() < at or action not in self._due:
                continue
            try:
                action()
            except StoreLostError as error:
                log.debug("%s; to be tried again", error)
            except Exception:  # others still need the thread
                log.exception("A call on the control channel has failed, and is made no more.")
                self._due.pop(action, None)
            if self._due.get(action) == (seconds, at):  # it may have changed its interval, or ended
                self._due[action] = (seconds, time.monotonic() + seconds)


def _start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    # It is a daemon, because it may wait for ever for a server that is gone.
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


@atexit.register
def _end_calls() -> None:
    """Wait for the calls under way, for a few seconds.

    Python ends a daemon thread that comes back from native code after the interpreter has ended. Up to Python 3.13 it
    does so by unwinding the thread's stack, and torch's C++ code answers that by aborting the process.
    """
    for worker in list(_workers):
        worker.close()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


def heartbeat_key(process: str) -> str:
    """Return the key of the heartbeats of a process, which is given by its `Channel.id`."""
    return f"{_FOLDER}/beat/{process}"


# The open channels of this process by the address of their store, each with the number of its users. There is only one
# unless a Trainer runs alone beside a process group.
_open: dict[tuple[str | None, str | None], tuple[Channel, int]] = {}
_opening = threading.Lock()


def lease_channel(world_size: int) -> tuple[Channel, Callable[[], None]] | None:
    """Return the channel of this process, and open it if nobody uses it yet. A single rank's store is in its memory.

    Returns:
        The channel, and what its user must call in the end: the last user's call closes it. None if the process group
        was not made with MASTER_ADDR and MASTER_PORT, or nothing answers there.
    """
    alone = world_size == 1
    address = (None, None) if alone else (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))

    def give_back() -> None:
        with _opening:
            channel, users = _open[address]
            if users > 1:
                _open[address] = channel, users - 1
            else:
                del _open[address]
                channel.close()

    with _opening:
        if address not in _open:
            store = another_connection(world_size, _STORE_TIMEOUT)
            if store is None:
                return None
            channel = Channel(store, lambda: another_connection(world_size, _STORE_TIMEOUT))
        else:
            channel, _ = _open[address]
        _open[address] = channel, _open.get(address, (channel, 0))[1] + 1
    return channel, give_back
