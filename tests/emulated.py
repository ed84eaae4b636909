"""Processes of an emulated job, as the tests start them."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence

from azureml_strategy.cluster.emulated import without_job_variables
from azureml_strategy.cluster.launch import Launch

# What processes that share one machine need, whatever they run.
SHARED_MACHINE = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
}

# What Azure ML's own page lists for `distribution: {type: pytorch}`, and what shows that it is Azure ML.
DOCUMENTED = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "RANK", "LOCAL_RANK", "AZUREML_RUN_ID")


def only_documented(environ: Mapping[str, str]) -> dict[str, str]:
    """A process's environment as a platform gives it that sets the documented variables and no others."""
    return without_job_variables(environ) | {name: environ[name] for name in DOCUMENTED}


def loopback_addresses(nodes: int) -> list[str]:
    """One for each node: Linux answers to all of 127.0.0.0/8."""
    return [f"127.0.2.{node + 1}" for node in range(nodes)]


def launches(
    addresses: Sequence[str], processes_per_node: int, port: int, distribution: str = "pytorch"
) -> Iterator[Launch]:
    """How Azure ML starts each process of a job, by rank."""
    nodes = len(addresses)
    world_size = nodes * processes_per_node
    for rank in range(world_size):
        node, local_rank = divmod(rank, processes_per_node)
        yield Launch(distribution, rank, world_size, local_rank, processes_per_node, node, nodes, addresses[0], port)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
