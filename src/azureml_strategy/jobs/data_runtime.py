"""What Azure ML's data runtime is told of the data that a job mounts: its variables, by access pattern and disk.

The variables, their units and what each pattern needs: MicrosoftDocs/azure-ai-docs, articles/machine-learning/
how-to-read-write-data-v2.md, "Available mount settings" and "Optimum mount settings for common scenarios".
"""

from __future__ import annotations

from collections.abc import Collection

from azureml_strategy.jobs.errors import JobError
from azureml_strategy.network.vm_sizes import VMSize

# One pass: what was read once is not read again, so that writing it to the disk, or keeping it, is lost work.
_ONCE = {
    "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "true",
    "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "false",
    "DATASET_MOUNT_MEMORY_CACHE_SIZE": "0",
}
_PATTERNS = {
    "epochs": {"DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "true"},
    "once": _ONCE,
    "once_large": {**_ONCE, "DATASET_MOUNT_READ_BUFFER_BLOCK_COUNT": "80"},
    # Whole files, since blocks that are read ahead of a random place are lost work.
    "random": {"DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "false"},
}
ACCESS_PATTERNS = tuple(_PATTERNS)
# Left free on the local disk, for the image and for what the job writes itself: a node whose disk is full ends its
# job. A choice of ours: images with CUDA take 20 GiB and more.
_FREE_GIB = 32
_FREE_FRACTION = 0.1


def data_runtime_variables(patterns: Collection[str], size: VMSize | None) -> dict[str, str]:
    """Variables for a job that mounts data.

    Args:
        patterns: how each mounted input is read, a name of `ACCESS_PATTERNS` each.
        size: of the node; None where nobody knows.

    Returns:
        Names and values; none without a mounted input.

    Raises:
        JobError: an unknown pattern, or two that need different variables, which hold for the whole job.
    """
    for pattern in patterns:
        if pattern not in _PATTERNS:
            raise JobError(f"There is no access pattern {pattern!r}. Known: {', '.join(ACCESS_PATTERNS)}.")
    different = sorted(set(patterns))
    if not different:
        return {}
    if len(different) > 1:
        raise JobError(
            f"The mounted inputs are read in different ways ({', '.join(different)}), but the data runtime's variables "
            "hold for the whole job. Give them the same `access`, or let the smaller one be copied: mode: download."
        )
    pattern = different[0]
    keeps = pattern in ("epochs", "random")
    return {**_PATTERNS[pattern], **(_cache_size(size) if keeps else {})}


def _cache_size(size: VMSize | None) -> dict[str, str]:
    """As much of the disk as can be spared; the runtime's own default leaves 150 MB free."""
    if size is None or size.local_disk_gib is None:
        return {}
    spared = int(size.local_disk_gib - max(_FREE_GIB, _FREE_FRACTION * size.local_disk_gib))
    return {"DATASET_MOUNT_CACHE_SIZE": str(spared * 2**30)}  # bytes
