"""Reads the variables of `distribution: {type: ray}`: one process on each node, beside Ray's own.

Azure ML documents no variables for Ray. This module reads what public ray-on-azureml set-ups read: the head's address
and the common runtime's node index. RAY_ADDRESS tells a process below Ray from a job without a distribution block.
"""

from __future__ import annotations

from collections.abc import Mapping

from azureml_strategy.cluster.environ import (
    LaunchError,
    declared_node_rank,
    describe,
    is_placeholder,
    main_address,
    main_port,
    node_count,
)
from azureml_strategy.cluster.launch import Launch

_USED = ("RAY_ADDRESS", "AZUREML_NODE_COUNT", "AZUREML_CR_NODE_RANK", "AZ_BATCHAI_JOB_MASTER_NODE_IP")


def read(environ: Mapping[str, str]) -> Launch | None:
    """Read the launch of a job's process beside a Ray cluster; None without Ray, and for Ray on one node.

    Raises:
        LaunchError: the node's index or the number of nodes is unknown.
    """
    if "RAY_ADDRESS" not in environ:
        return None
    num_nodes, node_rank = node_count(environ), declared_node_rank(environ)
    if node_rank is None and num_nodes in (None, 1):
        return None  # Ray on one node, as with Ray Tune: Ray's own integration knows the ranks
    if num_nodes is None or node_rank is None:
        raise LaunchError(
            "This process belongs to a Ray cluster, but its place in the job is not known "
            f"({describe(environ, _USED)}). Use `distribution: {{type: pytorch}}`, or start training through Ray Train "
            "with Lightning's Ray strategy."
        )
    return Launch(
        launcher="ray",
        rank=node_rank,
        world_size=num_nodes,
        local_rank=0,
        local_world_size=1,
        node_rank=node_rank,
        num_nodes=num_nodes,
        main_address=main_address(environ, num_nodes),
        main_port=main_port(environ, trusted=not is_placeholder(environ.get("MASTER_ADDR", ""))),
    )
