"""Where a job reads and writes: mounts, free space, and the folder for outputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.doctor.mounts import Mount, mount_of, read_mounts
from azureml_strategy.network.findings import Finding

# Where Azure mounts the resource disk and NVMe disks.
_LOCAL_DISKS = ("/mnt", "/scratch", "/nvme")
# A checkpoint of ResNet-50 with its optimizer takes 0.2 GB, torch's caches of compiled code some more.
_LITTLE_GB = 5


def check_storage(facts: Facts) -> Iterator[Finding]:
    """Free space of local folders, mounts of remote data, and whether outputs can be written."""
    mounts = read_mounts(facts.root / "proc")
    yield from _local(facts, mounts)
    for mount in mounts:
        if mount.is_remote:
            access = "read-only" if mount.read_only else "read and write"
            yield Finding("ok", "mount", f"{mount.target}: {mount.source} ({mount.kind}), {access}")
    if facts.job:
        yield from _outputs()


def _local(facts: Facts, mounts: tuple[Mount, ...]) -> Iterator[Finding]:
    here = _working_directory()
    if here:
        yield from _space("working directory", here)
    yield from _space("/tmp", facts.root / "tmp")
    shown = {mount.source for mount in (mount_of(here, mounts), mount_of(Path("/tmp"), mounts)) if mount}
    for mount in mounts:
        if mount.is_disk and mount.source not in shown and mount.target.startswith(_LOCAL_DISKS):
            shown.add(mount.source)
            yield from _space(mount.target, facts.root / mount.target.lstrip("/"))


def _space(name: str, folder: Path) -> Iterator[Finding]:
    try:
        status = os.statvfs(folder)
    except OSError:
        return
    yield judge_space(name, status.f_frsize * status.f_bavail / 1e9, status.f_frsize * status.f_blocks / 1e9)


def judge_space(name: str, free_gb: float, total_gb: float) -> Finding:
    """Whether a file system has room for a training run.

    Args:
        name: what is shown.
        free_gb: what an ordinary user can write, in GB.
        total_gb: its size, in GB.
    """
    text = f"{free_gb:,.0f} GB free of {total_gb:,.0f} GB"
    if free_gb >= _LITTLE_GB:
        return Finding("ok", name, text)
    return Finding("warning", name, f"{text}: checkpoints or caches may not fit.", "Remove what is not needed.")


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None


def _outputs() -> Iterator[Finding]:
    """Azure ML uploads `outputs` of the working directory while the job runs."""
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
