from __future__ import annotations

from pathlib import Path

import pytest

from azureml_strategy.strategies.zero.config import find_local_disk, nvme_mounts

# As Linux shows it on a VM with eight NVMe disks behind one RAID, and in a container on it.
VM = """\
/dev/root / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/sda15 /boot/efi vfat rw 0 0
/dev/nvme8n1p1 / ext4 rw 0 0
/dev/md127 /mnt/resource_nvme xfs rw,noatime 0 0
/dev/nvme0n1 /mnt/with\\040blank ext4 rw 0 0
10.0.0.9:/share /mnt/share nfs4 rw 0 0
blobfuse2 /mnt/azureml/data fuse rw 0 0
"""


def test_local_disks_of_a_vm() -> None:
    assert list(nvme_mounts(VM)) == ["/mnt/resource_nvme", "/mnt/with blank"]


def test_the_folder_must_be_there_and_writable(tmp_path: Path) -> None:
    disk, mounts = tmp_path / "disk", tmp_path / "mounts"
    mounts.write_text(f"/dev/nvme0n1 {tmp_path}/gone ext4 rw 0 0\n/dev/nvme1n1 {disk} xfs rw 0 0\n")
    with pytest.raises(FileNotFoundError, match="offload_nvme='/path'"):
        find_local_disk(mounts)
    (tmp_path / "gone").write_text("a file, as a container has for /etc/hosts")
    disk.mkdir()
    assert find_local_disk(mounts) == disk
