"""Writes and reads the variables of processes that our own strategies start, one for each further device of a node."""

from __future__ import annotations

from collections.abc import Mapping

from azureml_strategy.cluster.environ import required_number
from azureml_strategy.cluster.launch import Launch

# Holds the name of the job's launcher. Its presence shows that `variables` below wrote the environment.
MARKER = "AZUREML_STRATEGY_LAUNCHER"
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_PORT")


def variables(launch: Launch) -> dict[str, str]:
    """Return the variables for a process that a strategy starts: those PyTorch and DeepSpeed read, and a marker."""
    return {
        MARKER: launch.launcher,
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "NODE_RANK": str(launch.node_rank),
        "MASTER_ADDR": launch.main_address,
        "MASTER_PORT": str(launch.main_port),
    }


def read(environ: Mapping[str, str]) -> Launch | None:
    """Read the launch of a process that one of our strategies started, or that started others; None for any other."""
    if MARKER not in environ:
        return None
    why = f"{MARKER}={environ[MARKER]!r} says that a strategy of azureml-strategy wrote it"
    number = {name: required_number(environ, name, why) for name in NUMBERS}
    return Launch(
        launcher=environ[MARKER],
        rank=number["RANK"],
        world_size=number["WORLD_SIZE"],
        local_rank=number["LOCAL_RANK"],
        local_world_size=number["LOCAL_WORLD_SIZE"],
        node_rank=number["NODE_RANK"],
        num_nodes=number["WORLD_SIZE"] // max(number["LOCAL_WORLD_SIZE"], 1),
        main_address=environ.get("MASTER_ADDR", "").strip(),
        main_port=number["MASTER_PORT"],
    )
