"""The node's own NVMe disk, for ZeRO to keep parameters and optimizer states on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# Disks behind these file systems are local: network shares and blob mounts have others.
_LOCAL = ("ext4", "xfs", "btrfs")
# A disk of its own, or several behind one software RAID, as on VM sizes with eight NVMe disks.
_DEVICES = ("/dev/nvme", "/dev/md")


def find_local_disk(mounts: Path = Path("/proc/mounts")) -> Path:
    """The writable folder with the most free space that is mounted from an NVMe disk of this node.

    Args:
        mounts: the table of mounts, as Linux shows it.

    Raises:
        FileNotFoundError: there is none.
    """
    table = mounts.read_text()
    folders = [Path(point) for point in nvme_mounts(table) if os.path.isdir(point) and os.access(point, os.W_OK)]
    if not folders:
        raise FileNotFoundError(
            "offload_nvme='auto', but no writable folder of this node is mounted from an NVMe disk. A container sees "
            "the disk only where it is mounted into it: give the job docker_args such as '-v /mnt/nvme:/mnt/nvme'. "
            "Or name a folder yourself: offload_nvme='/path'; or keep the states in memory: offload_optimizer=True."
        )
    return max(folders, key=lambda folder: shutil.disk_usage(folder).free)


def nvme_mounts(table: str) -> Iterator[str]:
    """Where the NVMe disks of a table of mounts are mounted; the root file system is not among them."""
    for line in table.splitlines():
        device, point, kind, *_ = line.split(" ")
        if device.startswith(_DEVICES) and kind in _LOCAL and point != "/":
            yield point.replace("\\040", " ")  # how the table writes a blank
