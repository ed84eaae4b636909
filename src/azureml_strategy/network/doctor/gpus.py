"""GPUs that are there, should be there, and are used."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator

from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.files import read_text
from azureml_strategy.network.findings import Finding

# `NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 ...`; the open one says `Kernel Module for x86_64`.
_DRIVER = re.compile(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)")
# The oldest driver for each CUDA (NVIDIA, "CUDA Compatibility", minor version compatibility); older ones need the
# forward-compatibility libraries, which images of CUDA have here.
_OLDEST_DRIVERS = {"13": 580, "12": 525}
_COMPATIBILITY_LIBRARIES = "usr/local/cuda/compat"


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Number and model against the size and the launch; driver against CUDA; torch's build against the vendor."""
    present, promised = len(facts.node.gpus.models), _promised(facts)
    if present < promised:
        yield _missing(present, promised, facts)
    elif present:
        yield Finding("ok", "GPUs", _names(facts))
    else:
        yield Finding("ok", "GPUs", "none: training runs on the CPU.")
    if present:
        yield from _driver(facts)
        yield from _build(facts)
        yield from _processes(facts, present)


def _promised(facts: Facts) -> int:
    size = facts.node.vm_size
    return (facts.job and facts.job.gpus_per_node) or (size and size.gpus) or 0


def _names(facts: Facts) -> str:
    names = Counter(name or "GPU (the driver hides its model)" for name in facts.node.gpus.models)
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _missing(present: int, promised: int, facts: Facts) -> Finding:
    seen = f"only {_names(facts)}" if present else "none"
    return Finding(
        "problem",
        "GPUs",
        f"{promised} are promised, {seen} can be seen here.",
        "Replace the node if a GPU has failed (restart the job with a fresh one). If the container was started by you, "
        "give it all GPUs: `docker run --gpus all`.",
    )


def _driver(facts: Facts) -> Iterator[Finding]:
    found = _DRIVER.search(read_text(facts.root / "proc/driver/nvidia/version") or "")
    if not found:
        return
    version, cuda = found[1], facts.versions["cuda"]
    oldest = _OLDEST_DRIVERS.get((cuda or "").partition(".")[0], 0)
    if int(version.partition(".")[0]) >= oldest or os.path.isdir(facts.root / _COMPATIBILITY_LIBRARIES):
        yield Finding("ok", "driver", f"NVIDIA {version}")
        return
    yield Finding(
        "problem",
        "driver",
        f"NVIDIA {version} is older than {oldest}, which CUDA {cuda} of the installed torch needs: torch sees no GPU.",
        "Install a torch built for an older CUDA, or use an image with the package cuda-compat.",
    )


def _build(facts: Facts) -> Iterator[Finding]:
    torch, amd = facts.versions["torch"] or "", facts.node.gpus.vendor == "amd"
    # Builds of a vendor's own image bear other labels, or none, and are right.
    if any(label in torch for label in ("+cpu", "+cu" if amd else "+rocm")):
        yield Finding(
            "problem",
            "torch",
            f"{torch} is no build for {'AMD' if amd else 'NVIDIA'} GPUs: they stay unused.",
            "Install the one that https://pytorch.org/get-started/locally names for this machine.",
        )


def _processes(facts: Facts, present: int) -> Iterator[Finding]:
    launch = facts.launch
    if launch is None or launch.local_world_size in (1, present):
        return
    number = f"{launch.local_world_size} processes on each node, but {present} GPU(s)"
    advice = f"Write `process_count_per_instance: {present}`."
    if launch.local_world_size > present:
        yield Finding("problem", "GPUs", f"{number}: NCCL refuses two ranks on one GPU.", advice)
    else:
        yield Finding("warning", "GPUs", f"{number}: {present - launch.local_world_size} stay idle.", advice)
