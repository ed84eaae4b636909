"""Which VM sizes a job or a cluster may ask for, and what each is called as a compute."""

from __future__ import annotations

import datetime
import re

from azureml_strategy.jobs.errors import JobError
from azureml_strategy.network.vm_sizes import UnknownVMSize, VMSize, bare_name, known_vm_sizes, lookup_vm_size

TIERS = ("dedicated", "low_priority")


def find_size(name: str) -> VMSize:
    """A VM size that can still be had.

    Args:
        name: in any case, with or without `Standard_`.

    Raises:
        JobError: no VM size has this name, its generation is missing, or Azure no longer offers it.
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
    """Refuse the name of a size that Azure no longer offers; any other text is let through.

    Raises:
        JobError: it is one; the message names others with as many GPUs.
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
    """The GPU sizes of the table that Azure still offers."""
    return tuple(size for size in known_vm_sizes() if not size.retired)


def check_nodes(size: VMSize, nodes: int, *, allowed: bool, option: str) -> None:
    """Refuse several nodes without InfiniBand, unless the user wants just that.

    Args:
        size: of each node.
        nodes: how many.
        allowed: whether the user has confirmed it.
        option: what to type to confirm.

    Raises:
        JobError: several such nodes, not confirmed.
    """
    if nodes <= 1 or size.infiniband or size.gpus == 0 or allowed:
        return
    without = "its InfiniBand is no SR-IOV device" if size.hcas else "it has no InfiniBand"
    raise JobError(
        f"{nodes} nodes of {size.name} would exchange gradients over Ethernet: {without}, and training then waits for "
        f"the network most of the time. {scale_up_advice(size, nodes) or _with_infiniband(size)} If you know that the "
        f"model exchanges little, confirm with {option}."
    )


def scale_up_advice(size: VMSize, nodes: int) -> str | None:
    """What to do before adding nodes: take more GPUs in one, which talk over NVLink or PCIe and not over a network.

    Args:
        size: of each node.
        nodes: how many.

    Returns:
        One sentence that names the largest size with the same GPU; None where there is one node, or none is larger.
    """
    same = [each for each in offered_sizes() if each.gpu_model == size.gpu_model]
    largest = max(same, key=lambda each: (each.gpus or 0, each.gpu_memory_gb == size.gpu_memory_gb), default=size)
    if nodes <= 1 or (largest.gpus or 0) <= (size.gpus or 0):
        return None
    return (
        f"Scale up before you scale out: {largest.name} has {largest.gpus} {largest.gpu_model} GPUs in one node, "
        f"where {size.name} has {size.gpus}."
    )


def _with_infiniband(size: VMSize) -> str:
    same = [each.name for each in offered_sizes() if each.gpu_model == size.gpu_model and each.infiniband]
    return f"With InfiniBand there is {', '.join(same)}." if same else "Use one node."


def compute_name(size: VMSize, tier: str) -> str:
    """The name a cluster of this size gets where the user gives none: letters, digits and hyphens, at most 32.

    Args:
        size: of its nodes.
        tier: `dedicated`, or `low_priority`, which Azure ML keeps in clusters of their own.
    """
    name = size.short_name.replace("_", "-")
    return f"{name}-low" if tier == "low_priority" else name
