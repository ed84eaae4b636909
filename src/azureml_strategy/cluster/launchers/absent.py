"""A job whose variables name no launcher: right on one node, silently wrong on several."""

from __future__ import annotations

from collections.abc import Mapping

from azureml_strategy.cluster.errors import GUARD_SWITCH, LaunchError, seen
from azureml_strategy.cluster.launchers.pytorch import PYTORCH_VARIABLES
from azureml_strategy.cluster.nodes import NODE_VARIABLES, declared_node_rank, node_count
from azureml_strategy.cluster.variables import is_placeholder


def refuse_if_distributed(environ: Mapping[str, str]) -> None:
    """Refuse to run as rank 0 of 1 where other processes run too.

    Raises:
        LaunchError: the job has several nodes, or half of a launcher's variables are there.
    """
    nodes = node_count(environ) or 1
    if nodes > 1 or (declared_node_rank(environ) or 0) > 0:
        raise LaunchError(
            f"This job has several nodes ({_set(environ, NODE_VARIABLES)}), but no launcher gave this process a "
            f"rank ({seen(environ, PYTORCH_VARIABLES)}): every node would train alone on all the data. "
            "Add to the job: `distribution: {type: pytorch, process_count_per_instance: 1}`. If each process is meant "
            f"to work alone, as in a parallel job, set {GUARD_SWITCH}=off."
        )
    half = [name for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name in environ]
    if half and not _written_by_lightning(environ):
        raise LaunchError(
            f"Some of the launcher's variables are set, but RANK is not ({seen(environ, PYTORCH_VARIABLES)}): this "
            "process cannot know its rank. Let Azure ML set all of them with "
            "`distribution: {type: pytorch}`, or remove those that are set in the job's `environment_variables`."
        )


def _written_by_lightning(environ: Mapping[str, str]) -> bool:
    """Lightning's own launcher on one node writes everything but RANK, with MASTER_ADDR=127.0.0.1."""
    return is_placeholder(environ.get("MASTER_ADDR", ""))


def _set(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return seen(environ, [name for name in (*names, "NODE_RANK", "AZUREML_CR_NODE_RANK") if name in environ])
