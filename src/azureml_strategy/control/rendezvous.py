"""Opens connections to the rendezvous store, through which the processes of a job exchange addresses and messages."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.5  # between two attempts
_CONNECT_SECONDS = 5.0  # after this time the host name is resolved again
_ANSWER_SECONDS = 10.0  # for a server with many clients
# A process may start several groups one after the other, and the store may outlive each of them.
_rounds = itertools.count()


def open_store(launch: Launch, timeout: timedelta, purpose: str | None = None) -> Store:
    """Open the rendezvous store of the job. Rank 0 or torchrun's agent serves it; torch's own store shares the server.

    The purpose is a prefix for the keys that nothing else uses. With None a counter gives the prefix, so each process
    of a group must open the store once.

    Raises:
        LaunchError: the store cannot be opened, or rank 0 did not open it in time.
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
    # The store of torchrun outlives the processes that torchrun restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"azureml_strategy/{attempt}/{next(_rounds) if purpose is None else purpose}", store)


def another_connection(world_size: int, timeout: timedelta) -> Store | None:
    """Open another connection to the store of the running process group, for a background thread.

    Calls on one connection wait for one another. On torch's connection, the thread would wait for the main thread's
    calls. A single rank gets a store in its own memory. A call may wait for a key until the timeout.

    Returns:
        The store. None if the group was not made with MASTER_ADDR and MASTER_PORT, or nothing answers there.
    """
    from torch.distributed import HashStore, TCPStore, is_initialized  # type: ignore[attr-defined]

    if world_size == 1:
        return HashStore()
    if not is_initialized():
        return None
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # The server was up before, so one that refuses now has ended. torch would retry until the timeout.
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
        connecting = min(timeout, timedelta(seconds=_ANSWER_SECONDS))
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=connecting)
    except (KeyError, ValueError, OSError, RuntimeError):
        return None
    store.set_timeout(timeout)
    return store


def agent_serves_store() -> bool:
    """Whether torchrun's agent on node 0 serves the store of the process group. Otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _await_server(launch: Launch, timeout: timedelta) -> None:
    """Wait until the address answers. torch itself would log a stack trace for each attempt."""
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
