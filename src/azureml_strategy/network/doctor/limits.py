"""Limits that a container puts on the process."""

from __future__ import annotations

import re
from collections.abc import Iterator

from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.files import read_text
from azureml_strategy.network.findings import Finding

_OPEN_FILES = re.compile(r"^Max open files\s+(\d+)\s+(\S+)", re.M)
_GIB = 1 << 30
# Azure ML's default of `shm_size` is 2g ("CLI (v2) command job YAML schema").
_AZURE_SHARED_MEMORY = 2 * _GIB
_SHARED_GIB_PER_GPU = 8
# Each tensor that a DataLoader worker hands over, and each socket of NCCL, takes one.
_ENOUGH_FILES = 4096


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Shared memory, locked memory and open files. What is wrong with locked memory, the plan's findings say."""
    yield from _shared_memory(facts)
    if facts.node.usable_hcas and not any(finding.subject == "locked memory" for finding in facts.plan.findings):
        limit = facts.node.memlock
        yield Finding("ok", "locked memory", "no limit" if limit is None else f"at most {limit / _GIB:.0f} GiB")
    yield from _open_files(facts)


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    size, gpus = facts.node.shared_memory, len(facts.node.gpus.models)
    if size is None:
        return
    text = f"{size / _GIB:.1f} GiB"
    if size > _AZURE_SHARED_MEMORY or not gpus:
        yield Finding("ok", "/dev/shm", text)
        return
    # float32 of 256 images with 224 pixels: 0.15 GB; a worker keeps two batches ready (torch, prefetch_factor).
    yield Finding(
        "warning",
        "/dev/shm",
        f"{text} (Azure ML's default is 2g). Workers of a DataLoader keep their batches there, two each: a batch of "
        "256 images takes 0.15 GB. Beyond the limit they die with a bus error.",
        f"Write `shm_size: {_SHARED_GIB_PER_GPU * gpus}g` in the job's `resources`.",
    )


def _open_files(facts: Facts) -> Iterator[Finding]:
    limit = _OPEN_FILES.search(read_text(facts.root / "proc/self/limits") or "")
    if limit is None or len(facts.node.gpus.models) < 2:
        return
    if int(limit[1]) >= _ENOUGH_FILES:
        yield Finding("ok", "open files", f"at most {limit[1]}")
        return
    yield Finding(
        "warning",
        "open files",
        f"at most {limit[1]}; each tensor from a DataLoader worker takes one, and each connection of NCCL.",
        f"Begin the command with `ulimit -n {limit[2]} &&`.",
    )
