"""Reads the variables of DeepSpeed's launcher (`deepspeed --no_ssh --node_rank ...`) started inside a job."""

from __future__ import annotations

from collections.abc import Mapping

from azureml_strategy.cluster.environ import main_address, main_port, required_number
from azureml_strategy.cluster.launch import Launch

# deepspeed/launcher/launch.py sets all three, and nothing else does.
MARKERS = ("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE")


def read(environ: Mapping[str, str]) -> Launch | None:
    """Read the launch of a worker that DeepSpeed's launcher started; None if it started none.

    Raises:
        LaunchError: its variables are incomplete.
    """
    if not all(name in environ for name in MARKERS):
        return None
    why = "CROSS_RANK, CROSS_SIZE and LOCAL_SIZE say that DeepSpeed's launcher started this process"
    num_nodes = required_number(environ, "CROSS_SIZE", why)
    return Launch(
        launcher="deepspeed",
        rank=required_number(environ, "RANK", why),
        world_size=required_number(environ, "WORLD_SIZE", why),
        local_rank=required_number(environ, "LOCAL_RANK", why),
        local_world_size=required_number(environ, "LOCAL_SIZE", why),
        node_rank=required_number(environ, "CROSS_RANK", why),
        num_nodes=num_nodes,
        main_address=main_address(environ, num_nodes, given_by_platform=True),
        main_port=main_port(environ, trusted=True),
    )
