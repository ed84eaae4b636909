from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.doctor.disks import Mount, check_limits, check_storage, judge_space, mount_of, read_mounts
from azureml_strategy.network.findings import Finding

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


GIB = 1 << 30


def with_shared_memory(facts: Any, size: int | None) -> Any:
    return replace(facts, node=replace(facts.node, shared_memory=size))


def shared_memory(facts: Any) -> list[Finding]:
    return [finding for finding in check_limits(facts) if finding.subject == "/dev/shm"]


@pytest.mark.parametrize(("size", "verdict"), [(64 << 20, "warning"), (2 * GIB, "warning"), (3 * GIB, "ok")])
def test_shared_memory_beside_gpus(tree: Any, read: Callable[..., Any], size: int, verdict: str) -> None:
    tree.nvidia("Tesla T4", 4)
    (finding,) = shared_memory(with_shared_memory(read(), size))
    assert finding.verdict == verdict
    assert f"{size / GIB:.1f} GiB" in finding.text
    assert (verdict == "ok") == (finding.advice is None)
    assert "shm_size: 32g" in (finding.advice or "shm_size: 32g")


def test_shared_memory_without_gpus(read: Callable[..., Any]) -> None:
    assert shared_memory(with_shared_memory(read(), 64 << 20))[0].verdict == "ok"
    assert not shared_memory(with_shared_memory(read(), None))


@pytest.mark.parametrize(("limit", "text"), [("unlimited", "no limit"), (str(64 * GIB), "at most 64 GiB")])
def test_locked_memory_that_suffices(tree: Any, read: Callable[..., Any], limit: str, text: str) -> None:
    tree.hca("mlx5_ib0")
    tree.memlock(limit)
    assert [finding.text for finding in check_limits(read()) if finding.subject == "locked memory"] == [text]


def test_locked_memory_that_does_not_is_said_once(tree: Any, read: Callable[..., Any]) -> None:
    tree.hca("mlx5_ib0")
    tree.memlock("65536")
    facts = read()
    assert [finding.subject for finding in facts.plan.findings] == ["locked memory"]
    assert "locked memory" not in [finding.subject for finding in check_limits(facts)]


@pytest.mark.parametrize(
    ("gpus", "limit", "verdicts"),
    [(8, "1024", ["warning"]), (8, "65536", ["ok"]), (1, "1024", []), (8, "unlimited", [])],
)
def test_open_files(tree: Any, read: Callable[..., Any], gpus: int, limit: str, verdicts: list[str]) -> None:
    tree.nvidia("Tesla T4", gpus)
    tree.write("proc/self/limits", f"Max open files            {limit:20} 524288               files\n")
    found = [finding for finding in check_limits(read()) if finding.subject == "open files"]
    assert [finding.verdict for finding in found] == verdicts
    assert all("ulimit -n 524288" in str(finding.advice) for finding in found if finding.verdict != "ok")


ReadFacts = Callable[..., Any]
MOUNTS = """\
overlay / overlay rw 0 0
/dev/sdb1 /mnt ext4 rw 0 0
/dev/sdb1 /etc/hosts ext4 rw 0 0
/dev/md0 /mnt/nvme xfs rw 0 0
/dev/md0 /mnt/azureml xfs rw 0 0
/dev/nvme9n1 /mnt/gone ext4 rw 0 0
/dev/sda1 /boot ext4 rw 0 0
rslex /mnt/azureml/cap/data-capability/wd/INPUT_images fuse ro,nosuid 0 0
blobfuse2 /mnt/out fuse.blobfuse2 rw 0 0
"""


def found(facts: Any) -> dict[str, list[Finding]]:
    by_subject: dict[str, list[Finding]] = {}
    for finding in check_storage(facts):
        by_subject.setdefault(finding.subject, []).append(finding)
    return by_subject


def test_disks_and_mounts(tree: Any, read: ReadFacts) -> None:
    tree.write("proc/self/mounts", MOUNTS)
    for folder in ("tmp", "mnt/nvme"):
        tree.write(f"{folder}/.keep", "")
    by_subject = found(read())
    assert list(by_subject) == ["working directory", "/tmp", "/mnt", "/mnt/nvme", "mount"]
    assert all("GB free of" in by_subject[name][0].text for name in list(by_subject)[:-1])
    assert [finding.text for finding in by_subject["mount"]] == [
        "/mnt/azureml/cap/data-capability/wd/INPUT_images: rslex (fuse), read-only",
        "/mnt/out: blobfuse2 (fuse.blobfuse2), read and write",
    ]


def test_the_disk_of_the_working_directory_is_not_repeated(tree: Any, read: ReadFacts, tmp_path: Path) -> None:
    tree.write("proc/self/mounts", f"/dev/sdb1 {tmp_path} ext4 rw 0 0\n/dev/sdb1 /mnt ext4 rw 0 0\n")
    tree.write("mnt/.keep", "")
    assert list(found(read())) == ["working directory"]


@pytest.mark.parametrize(("free", "verdict"), [(0, "warning"), (4.99, "warning"), (5.01, "ok"), (28_000, "ok")])
def test_little_space(free: float, verdict: str) -> None:
    finding = judge_space("/tmp", free, 28_000)
    assert finding.verdict == verdict
    assert finding.text.startswith(f"{free:,.0f} GB free of 28,000 GB")


def test_a_working_directory_that_is_gone(
    read: ReadFacts, job: ReadFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "working directory" not in found(read(job()))


def test_outputs_of_a_job(read: ReadFacts, job: ReadFacts, tmp_path: Path) -> None:
    assert "outputs" not in found(read())
    assert found(read(job()))["outputs"][0].verdict == "ok"
    Path("outputs").mkdir()
    assert found(read(job()))["outputs"][0].verdict == "ok"


def test_outputs_that_cannot_be_written(read: ReadFacts, job: ReadFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    # /proc refuses writes to root as well.
    monkeypatch.chdir("/proc/self")
    (finding,) = found(read(job()))["outputs"]
    assert finding.verdict == "problem"
    assert not os.access(".", os.W_OK)
