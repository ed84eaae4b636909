"""Reads the variables of `distribution: {type: pytorch}`.

These are RANK, WORLD_SIZE, LOCAL_RANK, NODE_RANK, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

from collections.abc import Mapping

from azureml_strategy.cluster.environ import (
    NODE_COUNT,
    NODE_VARIABLES,
    declared_node_rank,
    describe,
    is_placeholder,
    main_address,
    main_port,
    node_count,
    required_number,
    whole_number,
)
from azureml_strategy.cluster.launch import Launch, PartialLaunch, UnknownNodesError

PYTORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def read(environ: Mapping[str, str]) -> Launch | None:
    """Read the launch of a process that Azure ML started for PyTorch; None if RANK is not set.

    Only RANK shows that Azure ML started the process: Lightning's own launcher writes all the other variables.

    Raises:
        UnknownNodesError: no variable gives the node count.
        LaunchError: variables are missing that cannot be derived from the node count.
    """
    rank = whole_number(environ, "RANK")
    if rank is None:
        return None
    world_size = required_number(environ, "WORLD_SIZE", f"RANK={rank} is")
    local_rank, node_rank = whole_number(environ, "LOCAL_RANK"), declared_node_rank(environ)
    num_nodes = node_count(environ) or (1 if world_size == 1 else None)
    if num_nodes is None:
        raise _unknown_nodes(environ, rank, world_size, local_rank, node_rank)
    local_world_size = max(world_size // num_nodes, 1)
    polluted = num_nodes > 1 and is_placeholder(environ.get("MASTER_ADDR", ""))
    return Launch(
        launcher="pytorch",
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        num_nodes=num_nodes,
        main_address=main_address(environ, num_nodes, given_by_platform=True),
        main_port=main_port(environ, trusted=not polluted),
    )


def _unknown_nodes(
    environ: Mapping[str, str], rank: int, world_size: int, local_rank: int | None, node_rank: int | None
) -> UnknownNodesError:
    """Return the error of a process whose variables give no node count; the same on all ranks of a job.

    A node beyond the first could derive the count from its ranks, but node 0 could not. So all ranks have to ask.
    """
    address = main_address(environ, (node_rank or 0) + 1, given_by_platform=True)
    polluted = is_placeholder(environ.get("MASTER_ADDR", "")) and not is_placeholder(address)
    port = main_port(environ, trusted=not polluted)
    return UnknownNodesError(
        f"This is rank {rank} of {world_size}, but no variable says over how many nodes they are spread "
        f"({describe(environ, (*PYTORCH_VARIABLES, *NODE_VARIABLES))}). The ranks tell one another when a Trainer "
        f"starts. To know it before, set {NODE_COUNT} to the job's `resources.instance_count`.",
        PartialLaunch(rank, world_size, local_rank, node_rank, address, port),
    )
