"""A disk of its own that fills up, or turns read-only, in the middle of training."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.fault import WELL, Attempt, Fault
from tests.faults.orders import Order

# 64 MB: what a checkpoint needs beside itself before it is begun is 16.
_SIZE = "64m"


@contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """A small file system of its own below a folder; root only."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def why_not() -> str:
    """Why there can be no such disk here; empty where there can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    return probe.stderr.strip() if probe.returncode else ""


@dataclass(frozen=True)
class DiskFault(Fault):
    """The disk is as it was when the attempt is over, however that came."""

    @contextmanager
    def around(self, attempt: Attempt) -> Iterator[None]:
        yield
        subprocess.run(_remount("rw", attempt.checkpoints), check=True)
        (attempt.checkpoints / "ballast").unlink(missing_ok=True)


def full(moments: random.Random, checkpoints: Path, sharded: bool) -> Fault:
    """Full but for some bytes: before a checkpoint is begun, or in the middle of it; for some steps."""
    left = moments.choice([0, moments.randrange(4096), moments.randrange(1 << 16), moments.randrange(1 << 20)])
    ballast = shlex.quote(str(checkpoints / "ballast"))
    # `head` writes until nothing more fits, and complains
    fill = f"head -c 1G /dev/zero > {ballast} 2>/dev/null; truncate -s -{left} {ballast}; true"
    at, steps = moments.randint(1, 10), moments.randint(2, 12)
    begin = moments.choice([Order("step", at, (0,)), Order("marked", 1 + at // 4, (0,))])
    filled = Order(begin.place, begin.occurrence, (0,), command=("sh", "-c", fill))
    emptied = Order("step", at + steps, (0,), command=("rm", "-f", str(checkpoints / "ballast")))
    codes = None if sharded and begin.place == "marked" else WELL  # see docs/checkpoints.md: a shard may end the run
    return DiskFault(
        "disks", f"full but for {left} bytes at {begin.place} {begin.occurrence}", (filled, emptied), codes
    )


def read_only(moments: random.Random, checkpoints: Path) -> Fault:
    """Remounted read-only, as kernels do after an error, and back some steps later."""
    at = moments.randint(1, 10)
    turned = Order("step", at, (0,), command=_remount("ro", checkpoints))
    back = Order("step", at + moments.randint(2, 12), (0,), command=_remount("rw", checkpoints))
    return DiskFault("disks", f"read-only at step {at}", (turned, back), WELL)


def _remount(how: str, checkpoints: Path) -> tuple[str, ...]:
    """Again and again: not while a file is open for writing."""
    mount = f"mount -o remount,{how} {shlex.quote(str(checkpoints))} 2>/dev/null"
    return ("sh", "-c", f"for i in $(seq 3000); do {mount} && exit; sleep 0.02; done; exit 1")
