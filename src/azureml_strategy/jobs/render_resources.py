"""Nodes, processes and limits of a job, in azure-ai-ml's words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.settings import ClusterSettings, IdentitySettings, JobSettings
from azureml_strategy.jobs.sizes import TIERS, check_nodes, compute_name, find_size
from azureml_strategy.network.vm_sizes import VMSize

if TYPE_CHECKING:
    from azure.ai.ml.entities import (
        AmlTokenConfiguration,
        ManagedIdentityConfiguration,
        UserIdentityConfiguration,
    )

SERVERLESS = "serverless"
DISTRIBUTIONS = ("pytorch", "mpi", "tensorflow", "ray")
# Docker's own 64 MB, and Azure ML's 2 GB, end loader processes and NCCL's shared-memory transport with a bus error.
_SHARED_MEMORY_OF_UNKNOWN_SIZE = "16g"
_SHARED_MEMORY = re.compile(r"[1-9]\d*[bkmg]", re.I)  # as `docker run --shm-size` takes it


def node_size(cluster: ClusterSettings) -> VMSize | None:
    """The VM size of the nodes, checked against their number; None where only a compute's name is known.

    Raises:
        JobError: neither size nor compute, a size that is unknown or retired, or nodes without InfiniBand.
    """
    if cluster.num_nodes < 1:
        raise JobError(f"cluster.num_nodes is {cluster.num_nodes}. A job has at least one node.")
    if cluster.tier not in TIERS:
        raise JobError(f"cluster.tier is {cluster.tier!r}. Known: {', '.join(TIERS)}.")
    if cluster.vm_size is None:
        if cluster.compute in (None, SERVERLESS):
            raise JobError(
                "No cluster is chosen. Name a VM size, cluster=nd96isr_h100_v5 say, or cluster.vm_size=Standard_... "
                "for a size that has no file."
            )
        return None
    size = find_size(cluster.vm_size)
    check_nodes(size, cluster.num_nodes, allowed=cluster.allow_ethernet, option="cluster.allow_ethernet=true")
    return size


def node_processes(cluster: ClusterSettings, distribution: str, size: VMSize | None) -> int:
    """How many processes Azure ML starts on each node: one a GPU, where the distribution can.

    Raises:
        JobError: more than GPUs, a number that the distribution cannot have, or one that nobody knows.
    """
    asked = cluster.processes_per_node
    if asked is not None and asked < 1:
        raise JobError(f"cluster.processes_per_node is {asked}. A node runs at least one process.")
    if distribution in ("tensorflow", "ray"):
        if asked not in (None, 1):
            raise JobError(
                f"cluster.processes_per_node is {asked}, but Azure ML starts one process a node for {distribution}. "
                "Leave it out: our strategies start one for each further GPU."
            )
        return 1
    if asked is None:
        if size is None or size.gpus is None:
            raise JobError(
                "How many GPUs a node has is not known. Say how many processes to start on it: "
                "cluster.processes_per_node=8, or name its size: cluster.vm_size=Standard_..."
            )
        return max(size.gpus, 1)
    if size is not None and size.gpus and asked > size.gpus:
        raise JobError(
            f"cluster.processes_per_node is {asked}, but {size.name} has {size.gpus} GPUs, and NCCL lets no two "
            f"processes share one. Leave it out for one a GPU, or take at most {size.gpus}."
        )
    return asked


def distribution_of(cluster: ClusterSettings, job: JobSettings, size: VMSize | None) -> Any:
    """Azure ML's distribution: how the processes are started and learn of one another.

    Raises:
        JobError: there is no such distribution, or its processes cannot be.
    """
    from azure.ai.ml import MpiDistribution, PyTorchDistribution, RayDistribution, TensorFlowDistribution

    if job.distribution not in DISTRIBUTIONS:
        raise JobError(f"job.distribution is {job.distribution!r}. Known: {', '.join(DISTRIBUTIONS)}.")
    processes = node_processes(cluster, job.distribution, size)
    if job.distribution == "tensorflow":
        return TensorFlowDistribution(worker_count=cluster.num_nodes)
    if job.distribution == "ray":
        return RayDistribution()
    kind = MpiDistribution if job.distribution == "mpi" else PyTorchDistribution
    return kind(process_count_per_instance=processes)


def resources_of(cluster: ClusterSettings, job: JobSettings, size: VMSize | None) -> dict[str, Any]:
    """Compute, nodes, limits and shared memory: arguments of `azure.ai.ml.command`.

    Raises:
        JobError: a limit that a node would refuse only after it has started.
    """
    if job.shm_size is not None and not _SHARED_MEMORY.fullmatch(job.shm_size):
        raise JobError(f"job.shm_size is {job.shm_size!r}. Write a number and one of b, k, m and g, such as 64g.")
    if job.timeout is not None and job.timeout < 1:
        raise JobError(f"job.timeout is {job.timeout}. Give the seconds, 1 or more, or null for no limit.")
    serverless = cluster.compute == SERVERLESS
    compute = cluster.compute or (compute_name(size, cluster.tier) if size else None)
    return {
        "compute": None if serverless else compute,
        "instance_count": cluster.num_nodes,
        "instance_type": size.name if serverless and size else None,
        "job_tier": "spot" if serverless and cluster.tier == "low_priority" else None,
        "shm_size": job.shm_size or _shared_memory(size),
        "docker_args": job.docker_args,
        "timeout": job.timeout,
    }


def price_tier(cluster: ClusterSettings) -> str:
    """Which price counts: low priority of serverless nodes is another than that of a cluster."""
    return "spot" if cluster.compute == SERVERLESS and cluster.tier == "low_priority" else cluster.tier


def identity_of(
    identity: IdentitySettings,
) -> ManagedIdentityConfiguration | UserIdentityConfiguration | AmlTokenConfiguration | None:
    """Whose rights the job has.

    Raises:
        JobError: there is no such type, or a client id that it does not take.
    """
    from azure.ai.ml.entities import AmlTokenConfiguration, ManagedIdentityConfiguration, UserIdentityConfiguration

    if identity.client_id and identity.type != "managed":
        raise JobError(f"job.identity.client_id is for job.identity.type=managed, but the type is {identity.type!r}.")
    if identity.type is None:
        return None
    if identity.type == "managed":
        return ManagedIdentityConfiguration(client_id=identity.client_id)
    if identity.type == "user_identity":
        return UserIdentityConfiguration()
    if identity.type == "aml_token":
        return AmlTokenConfiguration()
    raise JobError(f"job.identity.type is {identity.type!r}. Known: managed, user_identity, aml_token.")


def _shared_memory(size: VMSize | None) -> str:
    """Half of the memory, which Linux itself gives /dev/shm: a limit, of which only what is used is taken."""
    if size is None or size.memory_gib is None:
        return _SHARED_MEMORY_OF_UNKNOWN_SIZE
    return f"{size.memory_gib // 2}g"
