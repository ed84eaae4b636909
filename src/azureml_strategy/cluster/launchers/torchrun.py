"""Reads the variables of torchrun started inside a job.

torchrun is torch.distributed.run, which `accelerate launch` uses too.
"""

from __future__ import annotations

from collections.abc import Mapping

from azureml_strategy.cluster.environ import required_number, whole_number
from azureml_strategy.cluster.launch import Launch

# torch/distributed/elastic/agent/server/local_elastic_agent.py sets it for every worker.
_MARKER = "TORCHELASTIC_RUN_ID"
VARIABLES = (_MARKER, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def read(environ: Mapping[str, str]) -> Launch | None:
    """Read the launch of a torchrun worker; None for any other process.

    Raises:
        LaunchError: its variables are incomplete.
    """
    if _MARKER not in environ:
        return None
    why = f"{_MARKER} says that torchrun started this process"
    local_world_size = required_number(environ, "LOCAL_WORLD_SIZE", why)
    world_size = required_number(environ, "WORLD_SIZE", why)
    num_nodes = whole_number(environ, "GROUP_WORLD_SIZE") or world_size // max(local_world_size, 1)
    return Launch(
        launcher="torchrun",
        rank=required_number(environ, "RANK", why),
        world_size=world_size,
        local_rank=required_number(environ, "LOCAL_RANK", why),
        local_world_size=local_world_size,
        node_rank=required_number(environ, "GROUP_RANK", why),
        num_nodes=num_nodes,
        main_address=environ.get("MASTER_ADDR", "").strip(),
        main_port=required_number(environ, "MASTER_PORT", why),
    )
