"""Reads the facts about this node: VM size, GPUs, adapters, interfaces and NCCL's topology file."""

from __future__ import annotations

import http.client
import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from azureml_strategy.cluster.job import read_job
from azureml_strategy.network.infiniband import HCA, read_hcas
from azureml_strategy.network.sysfs import (
    GPUs,
    Interface,
    bootstrap_interface,
    gpudirect_support,
    read_gpus,
    read_interfaces,
    read_text,
)
from azureml_strategy.network.vm_sizes import UnknownVMSize, VMSize, known_vm_sizes, lookup_vm_size

# The same for every Azure VM: "MSFT AZURE VM" in ASCII. cloud-init and Azure's own agents recognize a VM by it.
_AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
VM_SIZE_URL = "http://169.254.169.254/metadata/instance/compute/vmSize?api-version=2021-01-01&format=text"
# The service runs on the host and answers in milliseconds; a container may block it.
TIMEOUT_SECONDS = 0.5
_NAME = re.compile(r"[\w-]{1,64}", re.A)  # Standard_ND96isr_H100_v5, Standard_HB120-16rs_v3

# Where Azure's HPC images put topology files (azhpc-images, components/customizations). A container sees them only if
# they are mounted or copied in.
_PLACES = ("opt/microsoft/{series}-topo.xml", "opt/microsoft/{series}/topo.xml")
# NCCL reads this one by itself.
_NCCL_DEFAULT = "var/run/nvidia-topologyd/virtualTopology.xml"
_MEMLOCK = re.compile(r"^Max locked memory\s+(\S+)", re.M)
_MEMORY_IN_MODEL = re.compile(r"(\d+)\s*GB")


def is_azure_vm(sysfs: str | Path = "/sys") -> bool:
    """Whether this machine is an Azure VM, by its chassis asset tag; uses no network."""
    return read_text(Path(sysfs) / "class/dmi/id/chassis_asset_tag") == _AZURE_ASSET_TAG


def instance_vm_size(url: str = VM_SIZE_URL, timeout_s: float = TIMEOUT_SECONDS) -> str | None:
    """The VM size that the metadata service names; None if it does not answer in time.

    The request bypasses any proxy. It runs on a thread, because a socket's own timeout restarts with every byte that
    arrives.
    """
    answers: list[str] = []
    thread = threading.Thread(target=_ask, args=(url, timeout_s, answers), name="instance-metadata", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else None


def _ask(url: str, timeout_s: float, answers: list[str]) -> None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=timeout_s)
    try:
        connection.request("GET", f"{address.path}?{address.query}", headers={"Metadata": "true"})
        response = connection.getresponse()
        text = response.read(256).decode("ascii", "replace").strip()
    except (OSError, http.client.HTTPException):
        return
    finally:
        connection.close()
    if response.status == 200 and _NAME.fullmatch(text):
        answers.append(text)


def topology_file(size: VMSize | None, root: str | Path = "/") -> Path | None:
    """The topology file for a VM size, below the folder that holds `opt`; None if this node has none."""
    if size is None or size.topology is None:
        return None
    paths = (Path(root) / place.format(series=size.topology) for place in _PLACES)
    return next((path for path in paths if os.path.isfile(path)), None)


def has_default_topology(root: str | Path = "/") -> bool:
    """Whether NCCL finds a topology file by itself."""
    return os.path.isfile(Path(root) / _NCCL_DEFAULT)


@dataclass(frozen=True)
class Node:
    """Facts about one node.

    Attributes:
        vm_size_name: name that the job or the machine gives, whether or not it is in the table; None if unknown.
        vm_size_source: origin of the name: `compute context`, `instance metadata` or `GPUs and HCAs`.
        vm_size: what is known about the size; None if there is no name or it is not that of a VM size.
        azure: whether the machine is an Azure VM.
        gpus: GPUs of the node.
        hcas: every port of every RDMA adapter, usable or not.
        interfaces: network interfaces of the node.
        topology_file: Azure's NCCL topology file for the size, if it is on this node.
        default_topology: whether NCCL finds a topology file by itself.
        gpudirect: mechanism of GPUDirect RDMA, from `gpudirect_support`; None if none was found.
        memlock: how much memory this process may lock, in bytes; None if unlimited or unknown.
        shared_memory: size of /dev/shm in bytes; None if there is none.
    """

    vm_size_name: str | None
    vm_size_source: str | None
    vm_size: VMSize | None
    azure: bool
    gpus: GPUs
    hcas: tuple[HCA, ...]
    interfaces: tuple[Interface, ...]
    topology_file: Path | None
    default_topology: bool
    gpudirect: str | None
    memlock: int | None
    shared_memory: int | None

    @property
    def usable_hcas(self) -> tuple[HCA, ...]:
        """The ports that NCCL can use for InfiniBand."""
        return tuple(hca for hca in self.hcas if hca.usable)

    @property
    def virtual(self) -> bool:
        """Whether this is an Azure VM, by its chassis or by the VM size that the job names."""
        return self.azure or self.vm_size is not None

    @property
    def bootstrap(self) -> Interface | None:
        """The interface through which nodes find one another."""
        return bootstrap_interface(self.interfaces)


def read_node(
    root: str | Path = "/", environ: Mapping[str, str] | None = None, *, metadata_url: str = VM_SIZE_URL
) -> Node:
    """Read the facts about this node. A fact that cannot be read counts as absent.

    Args:
        root: the folder that holds `sys`, `proc`, `dev` and `opt`.
        environ: environment variables of a process of the job; those of this process by default.
        metadata_url: address of the metadata service that tells an Azure VM its size.
    """
    root = Path(root)
    sysfs, proc, devices = root / "sys", root / "proc", root / "dev"
    azure = is_azure_vm(sysfs)
    gpus, hcas = read_gpus(sysfs, proc, devices), read_hcas(sysfs, devices)
    job = read_job(environ)
    name, source = job.vm_size if job else None, "compute context"
    if not name and azure:
        name, source = instance_vm_size(metadata_url), "instance metadata"
        if not name:
            name, source = guess_vm_size(gpus, sum(hca.is_infiniband for hca in hcas)), "GPUs and HCAs"
    size = None
    with suppress(UnknownVMSize):
        size = lookup_vm_size(name) if name else None
    memlock = _MEMLOCK.search(read_text(proc / "self/limits") or "")
    return Node(
        vm_size_name=name or None,
        vm_size_source=source if name else None,
        vm_size=size,
        azure=azure,
        gpus=gpus,
        hcas=hcas,
        interfaces=read_interfaces(sysfs, proc),
        topology_file=topology_file(size, root),
        default_topology=has_default_topology(root),
        gpudirect=gpudirect_support(sysfs, proc),
        memlock=int(memlock[1]) if memlock and memlock[1].isdecimal() else None,
        shared_memory=_capacity(devices / "shm"),
    )


def guess_vm_size(gpus: GPUs, hcas: int) -> str | None:
    """Guess the Azure VM size from its GPUs and its number of InfiniBand adapters.

    If sizes with equal vCPUs, topology file and adapter rate fit, such as `isr` and `isrf`, return the first. None if
    no size fits, or if several fit that differ in one of these.
    """
    candidates = [
        size
        for size in known_vm_sizes()
        if (size.gpus, size.accelerator, size.hcas if size.infiniband else 0) == (len(gpus.models), gpus.vendor, hcas)
        and all(_is_model(model, size) for model in gpus.models)
    ]
    kinds = {(size.vcpus, size.topology, size.hca_gbps) for size in candidates}
    return candidates[0].name if len(kinds) == 1 else None


def _is_model(model: str, size: VMSize) -> bool:
    """Whether a driver's model name, such as `NVIDIA A100-SXM4-80GB`, fits the size; an empty (hidden) name does."""
    if not model:
        return True
    memory = _MEMORY_IN_MODEL.search(model)
    if memory and size.gpu_memory_gb and float(memory[1]) != size.gpu_memory_gb:
        return False
    return size.gpu_model is not None and size.gpu_model.lower() in re.split(r"[^a-z0-9]+", model.lower())


def _capacity(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks
