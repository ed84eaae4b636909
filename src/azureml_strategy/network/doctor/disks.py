"""Checks of disks, mounts, shared memory and limits."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.findings import Finding
from azureml_strategy.network.sysfs import read_text

_ESCAPED = re.compile(r"\\([0-7]{3})")  # a blank in a path is \040
_REMOTE_KINDS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs")
_DISK_KINDS = ("ext3", "ext4", "xfs", "btrfs")
# Desktops, snaps and containers mount FUSE file systems here too, but these hold no job data.
_SYSTEM_FOLDERS = ("/proc", "/sys", "/dev", "/run", "/snap", "/var/lib")

_OPEN_FILES = re.compile(r"^Max open files\s+(\d+)\s+(\S+)", re.M)
_GIB = 1 << 30
# Azure ML's default of `shm_size` is 2g ("CLI (v2) command job YAML schema").
_AZURE_SHARED_MEMORY = 2 * _GIB
_SHARED_GIB_PER_GPU = 8
# Each tensor from a DataLoader worker and each NCCL socket takes one file descriptor.
_ENOUGH_FILES = 4096
# Where Azure mounts the resource disk and NVMe disks.
_LOCAL_DISKS = ("/mnt", "/scratch", "/nvme")
# A ResNet-50 checkpoint with its optimizer takes 0.2 GB; torch's caches of compiled code take some more.
_LITTLE_GB = 5


@dataclass(frozen=True)
class Mount:
    """One mounted file system."""

    source: str  # the device, or what the file system reports as its origin
    target: str  # mount point
    kind: str  # such as `ext4` or `fuse.blobfuse2`
    read_only: bool

    @property
    def is_remote(self) -> bool:
        """Whether it holds data from elsewhere: FUSE (Azure ML's data runtime, blobfuse) or a network file system."""
        system = any(PurePosixPath(self.target).is_relative_to(folder) for folder in _SYSTEM_FOLDERS)
        return self.kind in _REMOTE_KINDS or (re.match(r"fuse\b", self.kind) is not None and not system)

    @property
    def is_disk(self) -> bool:
        """Whether it is a local disk."""
        return self.kind in _DISK_KINDS


def read_mounts(proc: Path) -> tuple[Mount, ...]:
    """The mounts that this process sees. Of several at one target only the last, which hides the others."""
    rows = [line.split() for line in (read_text(proc / "self/mounts") or "").splitlines()]
    mounts = [Mount(_plain(row[0]), _plain(row[1]), row[2], "ro" in row[3].split(",")) for row in rows if len(row) >= 4]
    return tuple({mount.target: mount for mount in mounts}.values())


def mount_of(path: Path | None, mounts: tuple[Mount, ...]) -> Mount | None:
    """The mount that holds a path; None if no known mount does."""
    holding = [mount for mount in mounts if path and path.is_relative_to(mount.target)]
    return max(holding, key=lambda mount: len(mount.target), default=None)


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], base=8)), text)


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Check shared memory, locked memory and open files. The plan's findings already report locked-memory problems."""
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
    # 256 float32 images of 224 pixels take 0.15 GB; a worker keeps two batches ready (torch, prefetch_factor).
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


def check_storage(facts: Facts) -> Iterator[Finding]:
    """Check free space of local folders and whether outputs can be written; list the mounts of remote data."""
    mounts = read_mounts(facts.root / "proc")
    yield from _local(facts, mounts)
    for mount in mounts:
        if mount.is_remote:
            access = "read-only" if mount.read_only else "read and write"
            yield Finding("ok", "mount", f"{mount.target}: {mount.source} ({mount.kind}), {access}")
    if facts.job:
        yield from _outputs()


def _local(facts: Facts, mounts: tuple[Mount, ...]) -> Iterator[Finding]:
    here = None
    with suppress(OSError):  # the folder was removed
        here = Path.cwd()
        yield from _space("working directory", here)
    yield from _space("/tmp", facts.root / "tmp")
    shown = {mount.source for mount in (mount_of(here, mounts), mount_of(Path("/tmp"), mounts)) if mount}
    for mount in mounts:
        if mount.is_disk and mount.source not in shown and mount.target.startswith(_LOCAL_DISKS):
            shown.add(mount.source)
            yield from _space(mount.target, facts.root / mount.target.lstrip("/"))


def _space(name: str, folder: Path) -> Iterator[Finding]:
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        yield judge_space(name, usage.free / 1e9, usage.total / 1e9)


def judge_space(name: str, free_gb: float, total_gb: float) -> Finding:
    """Whether a file system has room for a training run, by the space that an ordinary user can write."""
    text = f"{free_gb:,.0f} GB free of {total_gb:,.0f} GB"
    if free_gb >= _LITTLE_GB:
        return Finding("ok", name, text)
    return Finding("warning", name, f"{text}: checkpoints or caches may not fit.", "Remove what is not needed.")


def _outputs() -> Iterator[Finding]:
    """Check that `outputs` is writable: Azure ML uploads this folder of the working directory while the job runs."""
    folder = "outputs" if os.path.exists("outputs") else "."
    if os.access(folder, os.W_OK):
        yield Finding("ok", "outputs", "the folder can be written; Azure ML uploads it.")
    else:
        yield Finding(
            "problem",
            "outputs",
            "the folder cannot be written, so checkpoints and results are lost.",
            "Run the job in its own working directory, as a user who may write there.",
        )
