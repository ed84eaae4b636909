"""The kernel's list of mounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.doctor.mounts import Mount, mount_of, read_mounts

INPUT = "/mnt/azureml/cr/j/0a1b/cap/data-capability/wd/INPUT_images"


def read(tree: Any, *lines: str) -> tuple[Mount, ...]:
    tree.write("proc/self/mounts", "\n".join(lines) + "\n")
    return read_mounts(tree.root / "proc")


def test_one_line(tree: Any) -> None:
    (mount,) = read(tree, f"rslex {INPUT} fuse ro,nosuid,relatime,user_id=0 0 0")
    assert mount == Mount("rslex", INPUT, "fuse", read_only=True)
    assert mount.is_remote
    assert not mount.is_disk


def test_blanks_are_escaped_and_later_mounts_hide_earlier_ones(tree: Any) -> None:
    first, second = read(
        tree, r"/dev/sda1 /my\040data ext4 rw 0 0", "tmpfs /tmp tmpfs rw 0 0", r"/dev/sdb1 /my\040data xfs ro 0 0"
    )
    assert first == Mount("/dev/sdb1", "/my data", "xfs", read_only=True)
    assert second.kind == "tmpfs"


@pytest.mark.parametrize(
    ("kind", "target", "remote"),
    [
        ("fuse", "/mnt/data", True),
        ("fuse.blobfuse2", "/workspace/out", True),
        ("nfs4", "/shared", True),
        ("cifs", "/mnt/batch/tasks/fsmounts/code", True),
        ("fuse.gvfsd-fuse", "/run/user/1000/gvfs", False),
        ("fuse.lxcfs", "/var/lib/lxcfs", False),
        ("fusectl", "/sys/fs/fuse/connections", False),
        ("fusectl", "/somewhere", False),
        ("ext4", "/", False),
    ],
)
def test_remote_data(kind: str, target: str, remote: bool) -> None:
    assert Mount("source", target, kind, read_only=False).is_remote == remote


def test_the_mount_of_a_path() -> None:
    mounts = tuple(Mount(name, target, "ext4", False) for name, target in (("a", "/"), ("b", "/mnt"), ("c", "/mnt/x")))
    sources = [mount_of(Path(path), mounts) for path in ("/home", "/mnt/y", "/mnt/x/z", "/mntx")]
    assert [mount and mount.source for mount in sources] == ["a", "b", "c", "a"]
    assert mount_of(Path("/home"), ()) is None
    assert mount_of(None, mounts) is None


def test_no_list(tmp_path: Path) -> None:
    assert read_mounts(tmp_path) == ()


@given(content=st.binary(max_size=200))
def test_any_content(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    proc = tmp_path_factory.mktemp("proc")
    (proc / "self").mkdir()
    (proc / "self/mounts").write_bytes(content)
    assert all(isinstance(mount, Mount) for mount in read_mounts(proc))
