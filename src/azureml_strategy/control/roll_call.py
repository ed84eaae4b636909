"""Waits at the start until all processes of the job are there, and names those that are missing."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from azureml_strategy.cluster.environ import LaunchError, node_addresses
from azureml_strategy.cluster.launch import Launch, rank_names
from azureml_strategy.control.process import Member, address_towards, this_process

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

_REMIND_SECONDS = 60.0
_POLL_SECONDS = 0.01
# How long the others wait for the outcome after rank 0's timeout, and rank 0 for the others to read it.
_GRACE_SECONDS = 5.0
# The processes at the last roll call. From here the hang watch knows a process that dies before its first heartbeat.
_members: list[Member] = []


@dataclass(frozen=True)
class _Arrival:
    """The message with which a process reports to the roll call."""

    member: Member
    address: str
    problem: str | None

    @classmethod
    def from_json(cls, text: str | bytes) -> _Arrival:
        values: dict[str, Any] = json.loads(text)
        return cls(**values | {"member": Member(**values["member"])})


@dataclass(frozen=True)
class _Outcome:
    """The message of rank 0 to all: the processes that are there, and the error, if any."""

    members: Sequence[Member]
    error: str | None

    @classmethod
    def from_json(cls, text: str | bytes) -> _Outcome:
        values: dict[str, Any] = json.loads(text)
        return cls([Member(**each) for each in values["members"]], values["error"])


def members() -> dict[int, Member]:
    """Return the processes at this process's last roll call, by rank; empty if there was none."""
    return {member.rank: member for member in _members}


def call_roll(store: Store, launch: Launch, timeout: timedelta, problem: str | None = None) -> None:
    """Wait until every process of the job is here and none of them has a problem.

    Args:
        store: from `rendezvous.open_store`.
        launch: this process's place.
        timeout: how long rank 0 waits for the others.
        problem: why this process cannot go on. The other processes then raise too, instead of waiting for it.

    Raises:
        LaunchError: processes are missing, or some have a problem. The message names them and is the same on every
            process. A process that loses rank 0 raises its own message.
    """
    arrival = _Arrival(
        this_process(launch.rank, launch.node_rank), address_towards(launch.main_address, launch.main_port), problem
    )
    store.set(f"arrived/{launch.rank}", json.dumps(asdict(arrival)))
    if store.add("count", 1) == launch.world_size:
        store.set("complete", "1")
    outcome = _lead(store, launch, timeout) if launch.rank == 0 else _follow(store, launch, timeout)
    if outcome.error:
        raise LaunchError(outcome.error)
    _members[:] = outcome.members


def _lead(store: Store, launch: Launch, timeout: timedelta) -> _Outcome:
    complete = _await_all(store, launch, timeout)
    arrivals = _arrivals(store, launch.world_size)
    error = _problems(arrivals)
    if not complete:
        error = (
            f"{len(arrivals)} of {launch.world_size} processes came to the rendezvous at {launch.main_address}:"
            f"{launch.main_port} within {timeout}. Missing: {_missing(launch, arrivals)}. Look at their logs "
            "(user_logs/std_log_process_RANK.txt): a process that failed before this point, a node that never started, "
            "or a network that keeps it from the address does this."
        )
    outcome = _Outcome([arrival.member for arrival in arrivals], error)
    store.set("outcome", json.dumps(asdict(outcome)))
    if outcome.error:
        # This process serves the store: the others must read the outcome before it ends.
        deadline = time.monotonic() + _GRACE_SECONDS
        while store.add("read", 0) < len(arrivals) - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    return outcome


def _follow(store: Store, launch: Launch, timeout: timedelta) -> _Outcome:
    from torch.distributed import DistError

    try:
        store.wait(["outcome"], timeout + timedelta(seconds=_GRACE_SECONDS))
        outcome = _Outcome.from_json(store.get("outcome"))
        store.add("read", 1)
    except DistError as error:
        raise LaunchError(
            f"Rank {launch.rank} lost rank 0 (node 0, {launch.main_address}:{launch.main_port}) while waiting for the "
            f"others to start. Look at rank 0's log (user_logs/std_log_process_0.txt). {error}"
        ) from error
    return outcome


def _await_all(store: Store, launch: Launch, timeout: timedelta) -> bool:
    """Wait for all processes, and log every minute which are missing. Return whether all arrived in time."""
    now = time.monotonic()
    deadline, reminder = now + timeout.total_seconds(), now + _REMIND_SECONDS
    # Polls instead of `store.wait`, because torch writes a warning to standard error for each wait that times out.
    while not store.check(["complete"]):
        time.sleep(_POLL_SECONDS)
        if time.monotonic() > deadline:
            return False
        if time.monotonic() > reminder:
            reminder += _REMIND_SECONDS
            log.warning("Still waiting for %s.", _missing(launch, _arrivals(store, launch.world_size)))
    return True


def _arrivals(store: Store, world_size: int) -> list[_Arrival]:
    keys = (f"arrived/{rank}" for rank in range(world_size))
    return [_Arrival.from_json(store.get(key)) for key in keys if store.check([key])]


def _problems(arrivals: list[_Arrival]) -> str | None:
    """Describe each problem with its ranks; None if there are none."""
    texts = dict.fromkeys(arrival.problem for arrival in arrivals if arrival.problem)
    described = []
    for text in texts:
        found = [arrival for arrival in arrivals if arrival.problem == text]
        hosts = ", ".join(dict.fromkeys(arrival.member.host for arrival in found))
        described.append(f"{rank_names([arrival.member.rank for arrival in found])} on {hosts}: {text}")
    return "\n".join(described) or None


def _missing(launch: Launch, arrivals: list[_Arrival]) -> str:
    """Name the missing ranks by node, with the hosts that are known."""
    absent = sorted(set(range(launch.world_size)) - {arrival.member.rank for arrival in arrivals})
    hosts = {arrival.member.node: arrival.member.host for arrival in arrivals}
    parts = []
    for node_rank, ranks in itertools.groupby(absent, key=lambda rank: rank // launch.local_world_size):
        host = f", host {hosts[node_rank]}" if node_rank in hosts else ""
        parts.append(f"{rank_names(list(ranks))} (node {node_rank}{host})")
    silent = sorted(set(node_addresses(os.environ)) - {arrival.address for arrival in arrivals})
    if silent and len(silent) == launch.num_nodes - len(hosts):
        parts.append(f"nothing came from {', '.join(silent)}")
    return "; ".join(parts)
