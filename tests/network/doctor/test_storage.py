"""Free space, mounts of data, and the folder for outputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from azureml_strategy.network.doctor.storage import check_storage, judge_space
from azureml_strategy.network.findings import Finding

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
