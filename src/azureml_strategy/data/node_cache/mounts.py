"""Finds out whether the folder of a set is a mount that keeps what is read on the node's disk itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from azureml_strategy.network.doctor.disks import mount_of, read_mounts

# Variables of Azure ML's data runtime, which mounts the inputs of a job: best-practices, largescale-deep-learning.
_BLOCKS, _WHOLE = "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED", "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED"


def double_cache_warning(folder: Path, environ: Mapping[str, str], proc: Path = Path("/proc")) -> str:
    """Say what to switch off where the mount of a folder caches what the node's cache keeps as well; else nothing.

    Args:
        folder: of the set.
        environ: environment variables of the job.
        proc: where Linux tells of its mounts.
    """
    mount = mount_of(folder.resolve(), read_mounts(proc))
    if mount is None or not mount.is_remote:
        return ""
    off = environ.get(_BLOCKS, "").lower() == "false" and environ.get(_WHOLE, "true").lower() != "false"
    if off or not mount.kind.startswith("fuse"):
        return ""
    return (
        f"{folder} lies on {mount.target}, a mount ({mount.kind}) that keeps what is read on this node's disk too, "
        "beside the node's cache: every byte twice. Switch one of them off. The mount's of Azure ML: "
        f"job.inputs.NAME.access=once, which sets {_BLOCKS}=false and DATASET_MOUNT_MEMORY_CACHE_SIZE=0; of blobfuse2: "
        "no file_cache among its components. Or read the shards without a mount, by their address: az://CONTAINER/PATH."
    )
