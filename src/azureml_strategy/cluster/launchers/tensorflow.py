"""Reads TF_CONFIG of `distribution: {type: tensorflow}`: it lists all tasks, and each one trains as one rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from azureml_strategy.cluster.environ import LaunchError, host_of, is_placeholder, main_port
from azureml_strategy.cluster.launch import Launch

# In this order, as in TensorFlow's own numbering: a chief is a worker with extra duties and comes first.
_TRAINING_TASKS = ("chief", "master", "worker")


def read(environ: Mapping[str, str]) -> Launch | None:
    """Read the launch of a TensorFlow task; None without TF_CONFIG.

    The global rank is the task's place in the list of chiefs, masters and workers. An empty `ps` list, which Azure ML
    may write, is ignored. So are the ports in TF_CONFIG: they belong to TensorFlow.

    Raises:
        LaunchError: TF_CONFIG is not valid, or this task does not train.
    """
    if not environ.get("TF_CONFIG", "").strip():
        return None
    cluster, task_type, index = _parse(environ["TF_CONFIG"])
    tasks = [(kind, i, host) for kind in _TRAINING_TASKS for i, host in enumerate(cluster.get(kind, []))]
    rank = next((rank for rank, (kind, i, _) in enumerate(tasks) if (kind, i) == (task_type, index)), None)
    if rank is None:
        raise LaunchError(
            f"TF_CONFIG={environ['TF_CONFIG']!r} makes this process `{task_type}` {index}, which is none of the "
            f"{len(tasks)} tasks that train. Leave parameter servers and evaluators out "
            "(`parameter_server_count: 0`), or better, use `distribution: {type: pytorch}`."
        )
    hosts = [host for _, _, host in tasks]
    nodes = list(dict.fromkeys(hosts))
    return Launch(
        launcher="tensorflow",
        rank=rank,
        world_size=len(tasks),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_world_size=hosts.count(hosts[rank]),
        node_rank=nodes.index(hosts[rank]),
        num_nodes=len(nodes),
        main_address=hosts[0],
        main_port=main_port(environ, trusted=not is_placeholder(environ.get("MASTER_ADDR", ""))),
    )


def _parse(text: str) -> tuple[dict[str, list[str]], str, int]:
    """Return the hosts of the cluster by task type, and this task's type and index."""
    try:
        config: dict[str, Any] = json.loads(text)
        task = config["task"]
        cluster = {kind: _hosts(hosts) for kind, hosts in config["cluster"].items()}
        return cluster, str(task["type"]), int(task["index"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise LaunchError(
            f"TF_CONFIG={text!r} cannot be read ({error!r}): it must be JSON with `cluster` and `task`, as in "
            '{"cluster": {"worker": ["10.0.0.4:2222"]}, "task": {"type": "worker", "index": 0}}. '
            "Use `distribution: {type: pytorch}` in the job, which needs none of it."
        ) from error


def _hosts(addresses: object) -> list[str]:
    """The hosts of one of the cluster's lists of addresses. Azure ML may write an empty list, or null."""
    if not isinstance(addresses, list | None):
        raise TypeError(f"{addresses!r} is not a list of addresses")
    return [host_of(str(address)) for address in addresses or []]
