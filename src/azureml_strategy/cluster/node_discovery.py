"""Finds the number of nodes where no variable gives it: every rank reports its place to rank 0.

The six variables that Azure ML documents for `distribution: {type: pytorch}` give a process its own place, but not the
number of nodes.

The ranks connect to MASTER_ADDR:MASTER_PORT before anything else uses that port. They use plain sockets, not a store of
torch: rank 0 would have to serve the store until the process group exists, a child process that becomes rank 0
(`ddp_spawn`) could not open the port again, and a group that is destroyed and started again would find the addresses of
the first one there. Here rank 0 stops listening before it answers, so that the port is free again.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from azureml_strategy.cluster.environ import NODE_COUNT, LaunchError
from azureml_strategy.cluster.launch import Launch, PartialLaunch, UnknownNodesError, rank_names
from azureml_strategy.cluster.launchers import detect_launch

log = logging.getLogger(__name__)


# torch's own limit for a process group, which the ranks are about to start. A rank that may be late there may be late
# here, for example because rank 0 downloads the data first.
_TIMEOUT = timedelta(minutes=30)
_REMIND_SECONDS = 60.0
_PAUSE_SECONDS = 0.1  # between two attempts to reach rank 0
_CONNECT_SECONDS = 5.0  # after this time the host name is resolved again
_REPORT_SECONDS = 5.0  # for the first line of a process that has connected
_GRACE_SECONDS = 5.0  # how much longer than rank 0 the others wait, so that all get its error
# Rank 0 speaks first. torch's store, which may have the port already, waits for the client instead.
_GREETING = b"azureml-strategy: who is there?\n"
_LONGEST_LINE = 65536
_ADVICE = f"set {NODE_COUNT} to the job's `resources.instance_count`"
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class _Place:
    """The message in which a rank reports its place."""

    rank: int
    world_size: int
    local_rank: int | None
    node_rank: int | None
    host: str
    pid: int


def learn_launch(timeout: timedelta | None = None) -> Launch | None:
    """Detect how Azure ML started this process, and ask the other ranks for what no variable gives.

    Like `detect_launch`, but where that cannot know the number of nodes, all ranks of the job must call this function.
    They wait for one another, and each writes the number to AZUREML_NODE_COUNT in its own environment. There
    `detect_launch` finds it from then on, and so do the processes that this one starts.

    Args:
        timeout: how long to wait for the other ranks; by default 30 minutes, as torch's process groups do.

    Raises:
        LaunchError: as `detect_launch`; or ranks are missing, or their reports contradict one another. Then the
            message names them and is the same on all ranks that connected.
    """
    with _one_at_a_time:
        try:
            return detect_launch()
        except UnknownNodesError as error:
            known = error.known
        os.environ[NODE_COUNT] = str(_ask(known, timeout or _TIMEOUT))
        return detect_launch()


def _ask(known: PartialLaunch, timeout: timedelta) -> int:
    own_place = _Place(
        known.rank, known.world_size, known.local_rank, known.node_rank, socket.gethostname(), os.getpid()
    )
    if _group_runs(known.world_size):
        places = _gather_places(own_place, timeout)
        answer: dict[str, Any] = {"error": _contradiction(places), "nodes": _nodes(places)}
    elif known.rank == 0:
        answer = _gather_as_rank_0(own_place, known, timeout)
    else:
        answer = _ask_rank_0(own_place, known, timeout)
    if answer["error"] is not None:
        raise LaunchError(answer["error"])
    return int(answer["nodes"])


def _group_runs(world_size: int) -> bool:
    """Whether the script has started a process group of all ranks itself, whose store has the port."""
    dist: Any = sys.modules.get("torch.distributed")
    return bool(dist and dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size)


def _gather_places(own_place: _Place, timeout: timedelta) -> list[_Place]:
    import torch.distributed as dist

    # Not through the script's group: NCCL would need each rank's device, which nobody has chosen yet.
    group = dist.new_group(backend="gloo", timeout=timeout)
    places: list[Any] = [None] * own_place.world_size
    dist.all_gather_object(places, own_place, group=group)
    dist.destroy_process_group(group)
    return places


def _gather_as_rank_0(own_place: _Place, known: PartialLaunch, timeout: timedelta) -> dict[str, Any]:
    """Receive the places of all other ranks, and send them the number of nodes, or an error."""
    deadline = time.monotonic() + timeout.total_seconds()
    connected: dict[_Place, socket.socket] = {}
    with ExitStack() as stack:
        with _listening(known) as listener:
            while 1 + len(connected) < own_place.world_size and (
                connection := _accept(listener, deadline, [own_place, *connected])
            ):
                stack.enter_context(connection)
                place = _receive_place(connection)
                if place is not None:
                    connected[place] = connection  # of its last attempt, if it made several
        # The port is closed before anyone gets an answer: a rank may go on at once to what opens this port next.
        places = [own_place, *connected]
        is_complete = len(places) == known.world_size
        error = _contradiction(places) if is_complete else _timeout_error(known, places, timeout)
        answer = {"error": error, "nodes": _nodes(places)}
        for connection in connected.values():
            with suppress(OSError):  # it has given up
                connection.sendall(_line(answer))
        return answer


def _accept(listener: socket.socket, deadline: float, connected: Sequence[_Place]) -> socket.socket | None:
    """Return the next connection; None if there was none in time. Log every minute which ranks are missing."""
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(min(left, _REMIND_SECONDS))
        with suppress(TimeoutError):
            return listener.accept()[0]
        if left > _REMIND_SECONDS:
            log.warning(
                "No variable gives the number of nodes, so all ranks must tell where they are before training starts. "
                "Still waiting for %s. If they make no Trainer, %s.",
                _missing_ranks(connected),
                _ADVICE,
            )
    return None


def _listening(known: PartialLaunch) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", known.main_port), family=family, backlog=known.world_size, dualstack_ipv6=dual)
    except OSError as error:
        raise LaunchError(
            f"No variable gives the number of nodes, and rank 0 cannot ask for it at "
            f"{known.main_address}:{known.main_port}: {error}. If another process of node 0 has the port, set "
            f"MASTER_PORT to a free one on all nodes; or {_ADVICE}."
        ) from error


def _receive_place(connection: socket.socket) -> _Place | None:
    """Return the place that the other side reports; None if it is no rank of this job."""
    try:
        connection.settimeout(_REPORT_SECONDS)
        connection.sendall(_GREETING)
        with connection.makefile("rb") as lines:
            return _Place(**json.loads(lines.readline(_LONGEST_LINE)))
    except (OSError, ValueError, TypeError):
        return None


def _ask_rank_0(own_place: _Place, known: PartialLaunch, timeout: timedelta) -> dict[str, Any]:
    address = known.main_address, known.main_port
    deadline = time.monotonic() + timeout.total_seconds()
    while (left := deadline - time.monotonic()) > 0:
        with suppress(OSError), socket.create_connection(address, timeout=min(left, _CONNECT_SECONDS)) as connection:
            line = _report_to_rank_0(connection, own_place, deadline)
            if line is not None and not line.endswith(b"\n"):
                raise LaunchError(
                    f"Rank {known.rank} lost rank 0 (node 0, {known.main_address}:{known.main_port}) while the ranks "
                    "told one another how many nodes there are. Look at rank 0's log (user_logs/std_log_process_0.txt)."
                )
            if line is not None:
                answer: dict[str, Any] = json.loads(line)
                return answer
        time.sleep(_PAUSE_SECONDS)
    raise LaunchError(
        f"No variable gives the number of nodes, and rank {own_place.rank} on {own_place.host} found no rank 0 at "
        f"{address[0]}:{address[1]} within {timeout} to learn it: rank 0 (node 0) has not started, makes no Trainer, "
        "has failed, or cannot be reached. Look at rank 0's log (user_logs/std_log_process_0.txt), and see that "
        f"MASTER_ADDR is an address of node 0 that the other nodes reach. Or {_ADVICE}."
    )


def _report_to_rank_0(connection: socket.socket, own_place: _Place, deadline: float) -> bytes | None:
    """Send this rank's place to rank 0. Return its answer; b"" if it went away; None if this is not rank 0."""
    # Rank 0 may be gone without a word, as when its node loses power.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with connection.makefile("rb") as lines:
        if lines.readline(_LONGEST_LINE) != _GREETING:
            return None
        try:
            connection.sendall(_line(asdict(own_place)))
            connection.settimeout(max(deadline - time.monotonic(), 0) + _GRACE_SECONDS)
            return lines.readline()
        except OSError:
            return b""


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _nodes(places: Iterable[_Place]) -> int:
    return len({place.node_rank for place in places})


def _contradiction(places: Sequence[_Place]) -> str | None:
    """Say why these cannot be the ranks of a job; None if they are."""
    processes = len(places) // _nodes(places)
    different = len({place.rank for place in places}) == len(places)
    if different and all(_has_right_place(place, processes, len(places)) for place in places):
        return None
    nodes = dict.fromkeys(place.node_rank for place in sorted(places, key=lambda place: place.rank))
    return (
        "No variable gives the number of nodes, and what the ranks tell of their places contradicts: "
        f"{'; '.join(_in_words([place for place in places if place.node_rank == node]) for node in nodes)}. Every "
        "node must have the same number of processes, and their ranks must follow one another. Remove what sets RANK, "
        f"WORLD_SIZE, LOCAL_RANK or NODE_RANK in the job or the script; or remove NODE_RANK, and {_ADVICE}."
    )


def _has_right_place(place: _Place, processes: int, world_size: int) -> bool:
    node_rank, local_rank = divmod(place.rank, processes)
    return (place.node_rank, place.world_size) == (node_rank, world_size) and place.local_rank in (None, local_rank)


def _in_words(node: Iterable[_Place]) -> str:
    """The places that the ranks of one node have reported, in words."""
    places = sorted(node, key=lambda place: place.rank)
    node_rank = places[0].node_rank
    local_ranks = ", ".join("not set" if place.local_rank is None else str(place.local_rank) for place in places)
    world_sizes = ", ".join(str(size) for size in dict.fromkeys(place.world_size for place in places))
    hosts = ", ".join(dict.fromkeys(place.host for place in places))
    return (
        f"NODE_RANK {'not set' if node_rank is None else node_rank}: {rank_names([place.rank for place in places])} "
        f"of {world_sizes} (LOCAL_RANK {local_ranks}) on {hosts}"
    )


def _timeout_error(known: PartialLaunch, places: Sequence[_Place], timeout: timedelta) -> str:
    return (
        f"No variable gives the number of nodes, and only {len(places)} of {known.world_size} ranks came to "
        f"{known.main_address}:{known.main_port} within {timeout} to tell where they are. Missing: "
        f"{_missing_ranks(places)}. Look at their logs "
        "(user_logs/std_log_process_RANK.txt): a process that failed before this point or makes no Trainer, a node "
        "that never started, or a network that keeps it from the address does this. If they make no Trainer, "
        f"{_ADVICE}."
    )


def _missing_ranks(connected: Sequence[_Place]) -> str:
    return rank_names(sorted(set(range(connected[0].world_size)) - {place.rank for place in connected}))
