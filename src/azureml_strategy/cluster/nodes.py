"""What Azure ML says of the job's nodes, whatever the launcher."""

from __future__ import annotations

from collections.abc import Mapping

from azureml_strategy.cluster.errors import LaunchError, seen
from azureml_strategy.cluster.variables import first_number, host_of, is_placeholder, whole_number

_COUNTS = ("AZUREML_NODE_COUNT", "NODE_COUNT")  # AmlCompute; the Singularity back end
_KUBERNETES_COUNTS = ("AMLARC_NUM_WORKER", "VC_WORKER_NUM")  # Azure Arc and AKS: one pod is one node
_INDICES = ("AZUREML_CR_NODE_RANK", "VK_TASK_INDEX", "VC_TASK_INDEX")
# In this order: the address alone, or with Batch's port, which host_of cuts off.
_MASTERS = (
    "AZ_BATCH_MASTER_NODE",
    "AZ_BATCHAI_MPI_MASTER_NODE",
    "AZ_BATCHAI_JOB_MASTER_NODE_IP",
    "MASTER_IP",
)

NODE_VARIABLES = (*_COUNTS, "AZ_BATCH_HOST_LIST", "AZ_BATCH_NODE_LIST", *_KUBERNETES_COUNTS)
ADDRESS_VARIABLES = ("MASTER_ADDR", *_MASTERS)


def in_azure_ml(environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to an Azure ML job: a managed cluster's, or one on attached Kubernetes."""
    if environ.get("AZUREML_RUN_ID") or environ.get("AZUREML_EXPERIMENT_ID"):
        return True
    return any(name.startswith(("AZ_BATCHAI_", "AMLARC_")) for name in environ)


def node_count(environ: Mapping[str, str]) -> int | None:
    """The number of nodes of the job, or None where nothing says it.

    Raises:
        LaunchError: a count is 0 or no number.
    """
    count = first_number(environ, _COUNTS)
    if count is None:
        count = len(node_addresses(environ)) or first_number(environ, _KUBERNETES_COUNTS)
    if count == 0:
        raise LaunchError(f"The job has 0 nodes ({seen(environ, NODE_VARIABLES)}). Remove the wrong variable.")
    return count


def node_addresses(environ: Mapping[str, str]) -> list[str]:
    """Addresses or names of the job's nodes as Azure Batch lists them; nothing where it does not."""
    return _entries(environ, "AZ_BATCH_HOST_LIST", ",") or _entries(environ, "AZ_BATCH_NODE_LIST", ";")


def declared_node_rank(environ: Mapping[str, str]) -> int | None:
    """NODE_RANK, else this node's index by the common runtime or by Kubernetes, else None."""
    node_rank = whole_number(environ, "NODE_RANK")
    return first_number(environ, _INDICES) if node_rank is None else node_rank


def main_address(environ: Mapping[str, str], num_nodes: int, *, given_by_platform: bool = False) -> str:
    """The host of global rank 0, without any port.

    Args:
        environ: the process's environment.
        num_nodes: nodes in the job.
        given_by_platform: whether the launcher sets MASTER_ADDR. Where it does not, a script or a library wrote what
            stands there, perhaps each node its own address, and Azure Batch's variables come first.

    Raises:
        LaunchError: several nodes, and nothing names the first one.
    """
    given = host_of(environ.get("MASTER_ADDR", ""))
    masters = [host_of(environ.get(name, "")) for name in _MASTERS]
    masters += _entries(environ, "VC_WORKER_HOSTS", ",")[:1]
    candidates = [given, *masters] if given_by_platform else [*masters, given]
    for address in candidates:
        if address and not is_placeholder(address):
            return address
    if num_nodes == 1:
        return next(filter(None, candidates), "127.0.0.1")
    raise LaunchError(
        f"The job has {num_nodes} nodes, but nothing names an address of the first one that the others can reach "
        f"({seen(environ, ADDRESS_VARIABLES)}). Set MASTER_ADDR to the address of node 0 on every node; "
        "a `distribution: {type: pytorch}` block in the job does it."
    )


def _entries(environ: Mapping[str, str], name: str, separator: str) -> list[str]:
    return [entry.strip() for entry in environ.get(name, "").split(separator) if entry.strip()]
