"""Checks the VM size, nodes, processes and services of a job or cluster, and writes them as azure-ai-ml's arguments."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from azureml_strategy.gpus import gpu_of
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.settings import ClusterSettings, IdentitySettings, JobSettings, ServiceSettings, check_choice
from azureml_strategy.network.vm_sizes import UnknownVMSize, VMSize, bare_name, known_vm_sizes, lookup_vm_size

_PUBLIC_KEYS = ("ssh-", "ecdsa-", "sk-")
TIERS = ("dedicated", "low_priority")
SERVERLESS = "serverless"
DISTRIBUTIONS = ("pytorch", "mpi", "tensorflow", "ray", "none")
PRIORITIES = ("low", "medium", "high")
# Docker's default of 64 MB and Azure ML's of 2 GB are too small: data-loader processes and NCCL's shared-memory
# transport die with a bus error.
_SHARED_MEMORY_OF_UNKNOWN_SIZE = "16g"
_SHARED_MEMORY = re.compile(r"[1-9]\d*[bkmg]", re.I)  # as `docker run --shm-size` takes it


def services_of(services: Mapping[str, ServiceSettings]) -> dict[str, Any]:
    """The ways into the running job as azure-ai-ml's classes.

    Raises:
        JobError: a type is unknown, a setting is another type's, or ssh has no public key.
    """
    return {name: _service(f"job.services.{name}", each.type or name, each) for name, each in services.items()}


def _service(place: str, kind: str, given: ServiceSettings) -> Any:
    from azure.ai.ml.entities import JupyterLabJobService, SshJobService, TensorBoardJobService, VsCodeJobService

    if given.nodes not in (None, "all"):
        raise JobError(f"{place}.nodes is {given.nodes!r}. Write all for every node, or null for the first one.")
    if given.ssh_public_keys and kind != "ssh":
        raise JobError(f"{place}.ssh_public_keys is for type ssh, and this one is {kind}.")
    if given.log_dir and kind != "tensor_board":
        raise JobError(f"{place}.log_dir is for type tensor_board, and this one is {kind}.")
    nodes: Any = given.nodes  # azure-ai-ml annotates the one word it takes
    if kind == "ssh":
        return SshJobService(nodes=nodes, ssh_public_keys=_read_public_key(place, given.ssh_public_keys))
    if kind == "tensor_board":
        return TensorBoardJobService(nodes=nodes, log_dir=given.log_dir)
    if kind == "vs_code":
        return VsCodeJobService(nodes=nodes)
    if kind == "jupyter_lab":
        return JupyterLabJobService(nodes=nodes)
    raise JobError(f"{place} has type {kind!r}. Known: ssh, vs_code, jupyter_lab, tensor_board.")


def _read_public_key(place: str, given: str | None) -> str:
    """The text of a public key, which the user gives as text or as a file."""
    if given is None:
        raise JobError(
            f"{place} needs {place}.ssh_public_keys: a public key, or its file, such as ~/.ssh/id_ed25519.pub."
        )
    if given.startswith(_PUBLIC_KEYS):
        return given
    file = Path(given).expanduser()
    text = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    if not text.startswith(_PUBLIC_KEYS):
        raise JobError(
            f"{place}.ssh_public_keys is neither a public key nor the file of one. Give ~/.ssh/id_ed25519.pub, say; "
            "the file beside it without .pub is the private key and stays here."
        )
    return text


def find_size(name: str) -> VMSize:
    """Look up a VM size that Azure still offers, by its name in any case, with or without `Standard_`.

    Raises:
        JobError: no VM size has this name, the name lacks its generation, or Azure no longer offers the size.
    """
    refuse_retired(name)
    try:
        size = lookup_vm_size(name)
    except UnknownVMSize as error:
        raise JobError(str(error)) from error
    whole = [
        each.name for each in offered_sizes() if re.fullmatch(rf"{re.escape(size.short_name)}_v\d+", each.short_name)
    ]
    if not size.known and whole:
        raise JobError(
            f"{name!r} is no VM size that we know of, but looks like {' or '.join(whole)} without its generation. Type "
            f"{whole[-1]}."
        )
    return size


def refuse_retired(name: str) -> None:
    """Refuse the name of a size that Azure no longer offers; accept any other text.

    Raises:
        JobError: the size is retired. The message names other sizes with as many GPUs.
    """
    today = datetime.date.today().isoformat()
    for size in known_vm_sizes():
        if size.short_name == bare_name(name).lower() and size.retired and size.retired <= today:
            successors = ", ".join(each.name for each in offered_sizes() if each.gpus == size.gpus)
            raise JobError(
                f"{size.name} was retired on {size.retired}: no cluster of it can be made and no job starts on it. "
                f"Sizes with as many GPUs: {successors}."
            )


def offered_sizes() -> tuple[VMSize, ...]:
    """The GPU sizes of the table that have no retirement date."""
    return tuple(size for size in known_vm_sizes() if not size.retired)


def check_nodes(size: VMSize, nodes: int, *, allowed: bool, option: str) -> None:
    """Refuse several GPU nodes without InfiniBand, unless the user has allowed them by the option.

    Raises:
        JobError: there are several such nodes, and they are not allowed.
    """
    if nodes <= 1 or size.infiniband or size.gpus == 0 or allowed:
        return
    connected = [each.name for each in offered_sizes() if each.gpu_model == size.gpu_model and each.infiniband]
    instead = f"With InfiniBand there is {', '.join(connected)}." if connected else "Use one node."
    without = "its InfiniBand is no SR-IOV device" if size.hcas else "it has no InfiniBand"
    raise JobError(
        f"{nodes} nodes of {size.name} would exchange gradients over Ethernet: {without}, and training then waits for "
        f"the network most of the time. {' '.join(filter(None, (instead, scale_up_advice(size, nodes))))} If you know "
        f"that the model exchanges little, confirm with {option}."
    )


def scale_up_advice(size: VMSize, nodes: int) -> str | None:
    """Advise one larger node in place of several: GPUs of one node talk over NVLink or PCIe, not over a network.

    Returns:
        A sentence or two that name the largest size with the same GPU, and by the planner's rates also the smallest
        single node, of any GPU, that is as fast as all the nodes together; None for one node, or if there is neither.
    """
    if nodes <= 1 or not size.gpus:
        return None
    same = [each for each in offered_sizes() if each.gpu_model == size.gpu_model]
    largest = max(same, key=lambda each: (each.gpus or 0, each.gpu_memory_gb == size.gpu_memory_gb), default=size)
    sentences = _as_fast(size, nodes, largest)
    if (largest.gpus or 0) > size.gpus:
        sentences.insert(
            0,
            f"{largest.name} has {largest.gpus} {largest.gpu_model} GPUs in one node, where {size.name} has "
            f"{size.gpus}.",
        )
    return f"Scale up before you scale out: {' '.join(sentences)}" if sentences else None


def _as_fast(size: VMSize, nodes: int, preferred: VMSize) -> list[str]:
    """A sentence about single nodes that the planner expects to be as fast: the preferred size and the smallest."""
    if gpu_of(size) is None:
        return []
    from azureml_strategy.planning.scale_up import nodes_worth  # torch, which other jobs need not

    found = nodes_worth(size, nodes, offered_sizes())
    chosen = {each.size.name: each for each in [*(each for each in found if each.size == preferred), *found[:1]]}
    if not chosen:
        return []
    told = [
        f"of one {each.size.name} ({each.size.gpus} {each.size.gpu_model}) {each.speed_up:.1f} times"
        for each in chosen.values()
    ]
    rates = f"At ResNet-50 the planner expects {' and '.join(told)} the rate of {nodes} x {size.name}"
    return [f"{rates}; `plan` says whether your model fits."]


def compute_name(size: VMSize, tier: str) -> str:
    """The default name of a cluster of this size: letters, digits and hyphens, at most 32.

    Azure ML keeps low-priority nodes in clusters of their own.
    """
    name = size.short_name.replace("_", "-")
    return f"{name}-low" if tier == "low_priority" else name


def node_size(cluster: ClusterSettings) -> VMSize | None:
    """The VM size of the nodes, checked against their number; None if only the name of the compute is known.

    Raises:
        JobError: the number of nodes or the tier is invalid, neither size nor compute is given, the size is unknown or
            retired, or several nodes have no InfiniBand.
    """
    if cluster.num_nodes < 1:
        raise JobError(f"cluster.num_nodes is {cluster.num_nodes}. A job has at least one node.")
    check_choice("cluster.tier", cluster.tier, TIERS)
    if cluster.vm_size is None:
        if cluster.compute is None:
            raise JobError(
                "No cluster is chosen. Name a VM size, cluster=nd96isr_h100_v5 say, or cluster.vm_size=Standard_... "
                "for a size that has no file."
            )
        return None
    size = find_size(cluster.vm_size)
    check_nodes(size, cluster.num_nodes, allowed=cluster.allow_ethernet, option="cluster.allow_ethernet=true")
    return size


def node_processes(cluster: ClusterSettings, distribution: str, size: VMSize | None) -> int:
    """How many processes Azure ML starts on each node: one per GPU by default, one per node for tensorflow and ray.

    Raises:
        JobError: the number is below 1, exceeds the GPUs, does not fit the distribution, or is neither given nor known.
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


def _distribution(cluster: ClusterSettings, job: JobSettings, size: VMSize | None) -> Any:
    """Azure ML's distribution, which starts the processes and tells them of one another; None for `none`.

    Raises:
        JobError: there is no such distribution, or its number of processes is invalid.
    """
    from azure.ai.ml import MpiDistribution, PyTorchDistribution, RayDistribution, TensorFlowDistribution

    check_choice("job.distribution", job.distribution, DISTRIBUTIONS)
    if job.parameter_server_count and job.distribution != "tensorflow":
        raise JobError(
            f"job.parameter_server_count is {job.parameter_server_count}, but job.distribution is {job.distribution}: "
            "parameter servers are TensorFlow's. Add job.distribution=tensorflow, or leave the number out."
        )
    if job.distribution == "none":
        if cluster.processes_per_node not in (None, 1):
            raise JobError(
                f"cluster.processes_per_node is {cluster.processes_per_node}, but job.distribution=none starts one "
                "process a node. Leave one of the two out."
            )
        if cluster.num_nodes > 1 and not job.plain:
            raise JobError(
                f"job.distribution=none on {cluster.num_nodes} nodes starts a process on each that is told of no "
                "other: each would train alone. Leave it out, take cluster.num_nodes=1, or, where the program finds "
                "the other nodes by itself, add job=plain."
            )
        return None
    processes = node_processes(cluster, job.distribution, size)
    if job.distribution == "tensorflow":
        servers = job.parameter_server_count
        if servers < 0:
            raise JobError(f"job.parameter_server_count is {servers}. Give 0 or more.")
        return TensorFlowDistribution(worker_count=cluster.num_nodes, parameter_server_count=servers)
    if job.distribution == "ray":
        return RayDistribution()
    kind = MpiDistribution if job.distribution == "mpi" else PyTorchDistribution
    return kind(process_count_per_instance=processes)


def resources_of(cluster: ClusterSettings, job: JobSettings, size: VMSize | None) -> dict[str, Any]:
    """Compute, nodes, processes, identity, queue, limits and shared memory as arguments of `azure.ai.ml.command`.

    Raises:
        JobError: a value is invalid. The service or a node would refuse it only later.
    """
    distribution, identity = _distribution(cluster, job, size), _identity(job.identity)
    if job.shm_size is not None and not _SHARED_MEMORY.fullmatch(job.shm_size):
        raise JobError(f"job.shm_size is {job.shm_size!r}. Write a number and one of b, k, m and g, such as 64g.")
    if job.timeout is not None and job.timeout < 1:
        raise JobError(f"job.timeout is {job.timeout}. Give the seconds, 1 or more, or null for no limit.")
    check_choice("job.queue.priority", job.queue.priority, PRIORITIES)
    if job.max_instance_count is not None and job.max_instance_count < cluster.num_nodes:
        raise JobError(
            f"job.max_instance_count is {job.max_instance_count}, below cluster.num_nodes={cluster.num_nodes}, from "
            "which the job may only grow."
        )
    serverless = cluster.compute == SERVERLESS
    if job.instance_type and (serverless or cluster.compute is None):
        raise JobError(
            f"job.instance_type={job.instance_type} is an instance type of a Kubernetes compute. Name that compute: "
            "cluster.compute=NAME. Serverless nodes are chosen by cluster=SIZE."
        )
    if job.locations and not serverless:
        raise JobError(f"job.locations={job.locations} is for serverless nodes: add cluster.compute=serverless.")
    compute = cluster.compute or (compute_name(size, cluster.tier) if size else None)
    return {
        "distribution": distribution,
        "identity": identity,
        "compute": None if serverless else compute,
        "instance_count": None if job.plain and cluster.num_nodes == 1 else cluster.num_nodes,
        "instance_type": size.name if serverless and size else job.instance_type,
        "job_tier": "spot" if serverless and cluster.tier == "low_priority" else None,
        "priority": job.queue.priority,
        "locations": job.locations,
        "shm_size": job.shm_size or (None if job.plain else _shared_memory(size)),
        "docker_args": job.docker_args,
        "timeout": job.timeout,
    }


def _identity(identity: IdentitySettings) -> Any:
    """The identity whose rights the job has.

    Raises:
        JobError: there is no such type, or the type takes no client id.
    """
    from azure.ai.ml.entities import AmlTokenConfiguration, ManagedIdentityConfiguration, UserIdentityConfiguration

    if identity.client_id and identity.type != "managed":
        raise JobError(f"job.identity.client_id is for job.identity.type=managed, but the type is {identity.type!r}.")
    check_choice("job.identity.type", identity.type, ("managed", "user_identity", "aml_token"))
    if identity.type == "managed":
        return ManagedIdentityConfiguration(client_id=identity.client_id)
    if identity.type == "user_identity":
        return UserIdentityConfiguration()
    return AmlTokenConfiguration() if identity.type else None


def _shared_memory(size: VMSize | None) -> str:
    """Half of the node's memory, as Linux gives /dev/shm by default. It is a limit: only what is used takes memory."""
    if size is None or size.memory_gib is None:
        return _SHARED_MEMORY_OF_UNKNOWN_SIZE
    return f"{size.memory_gib // 2}g"
