"""What is mounted where, as the kernel lists it; no mounted file system is touched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from azureml_strategy.network.files import read_text

_ESCAPED = re.compile(r"\\([0-7]{3})")  # a blank in a path is \040
_REMOTE_KINDS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs")
_DISK_KINDS = ("ext3", "ext4", "xfs", "btrfs")
# File systems of the desktop, of snaps and of containers are FUSE too, but hold no data of a job.
_SYSTEM_FOLDERS = ("/proc", "/sys", "/dev", "/run", "/snap", "/var/lib")


@dataclass(frozen=True)
class Mount:
    """One mounted file system.

    Attributes:
        source: the device, or what the file system calls its origin.
        target: where it is mounted.
        kind: type of the file system, such as `ext4` or `fuse.blobfuse2`.
        read_only: whether it refuses writes.
    """

    source: str
    target: str
    kind: str
    read_only: bool

    @property
    def is_remote(self) -> bool:
        """Whether it holds data from elsewhere: FUSE (Azure ML's data runtime, blobfuse) or a network file system."""
        system = any(PurePosixPath(self.target).is_relative_to(folder) for folder in _SYSTEM_FOLDERS)
        return self.kind in _REMOTE_KINDS or (re.match(r"fuse\b", self.kind) is not None and not system)

    @property
    def is_disk(self) -> bool:
        """Whether it is a disk of the machine."""
        return self.kind in _DISK_KINDS


def read_mounts(proc: Path) -> tuple[Mount, ...]:
    """The mounts that this process sees, each target once: the last, which hides the others."""
    rows = [line.split() for line in (read_text(proc / "self/mounts") or "").splitlines()]
    mounts = [Mount(_plain(row[0]), _plain(row[1]), row[2], "ro" in row[3].split(",")) for row in rows if len(row) >= 4]
    return tuple({mount.target: mount for mount in mounts}.values())


def mount_of(path: Path | None, mounts: tuple[Mount, ...]) -> Mount | None:
    """The mount that holds a path; None where none is known."""
    holding = [mount for mount in mounts if path and path.is_relative_to(mount.target)]
    return max(holding, key=lambda mount: len(mount.target), default=None)


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], base=8)), text)
