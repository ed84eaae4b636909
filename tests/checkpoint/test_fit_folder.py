"""Where checkpoints go that were given no folder, and what is said of a disk that a restart may not find."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from tests.checkpoint.conftest import put_checkpoint

from azureml_strategy.checkpoint import fit_resume
from azureml_strategy.checkpoint.fit_resume import (
    OUTPUT_VARIABLE,
    default_folder,
    folder_of_fit,
    is_of_this_run,
    this_process,
    warn_of_own_disk,
)
from azureml_strategy.files import filesystem_of


def test_the_jobs_output_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_folder(str(tmp_path)) == tmp_path / "checkpoints"
    monkeypatch.setenv(OUTPUT_VARIABLE, "/mnt/run")
    assert default_folder(str(tmp_path)) == Path("/mnt/run/checkpoints")


MOUNTS = """overlay / overlay rw 0 0
blobfuse2 /mnt/run fuse rw 0 0
tmpfs /mnt/run/fast tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/home/x", "overlay"), ("/mnt/run/a/b", "fuse"), ("/mnt/run/fast/c", "tmpfs"), ("/mnt/runs", "overlay")],
)
def test_the_file_system_of_a_folder(tmp_path: Path, folder: str, kind: str) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert filesystem_of(Path(folder), tmp_path / "mounts") == kind
    assert filesystem_of(Path(folder), tmp_path / "nothing") is None


def test_it_is_said_once_and_in_a_real_job_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fit_resume, "filesystem_of", lambda folder: "ext4")
    warn_of_own_disk(tmp_path / "checkpoints")
    monkeypatch.setenv("AZUREML_RUN_ID", "job-1")
    monkeypatch.setenv("AZ_BATCHAI_CLUSTER_NAME", "emulated")
    warn_of_own_disk(tmp_path / "checkpoints")
    assert not caplog.records
    monkeypatch.setenv("AZ_BATCHAI_CLUSTER_NAME", "gpu-cluster")
    for name in ("checkpoints", "checkpoints_2"):
        warn_of_own_disk(tmp_path / name)
    (said,) = caplog.records
    assert "on this node's own disk" in said.getMessage()


def test_a_forked_process_is_another_script(tmp_path: Path) -> None:
    """One that is killed and forked again goes on in its folder; it was the same one, which begins the next fit."""
    base, fit, context = tmp_path / "checkpoints", "A 1 at x.py:1", multiprocessing.get_context("fork")
    for _ in range(2):
        child = context.Process(target=lambda: folder_of_fit(base, fit, this_process(), in_place=True))
        child.start()
        child.join()
        assert child.exitcode == 0
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints"]
    assert folder_of_fit(base, fit, this_process(), in_place=True) == base
    assert folder_of_fit(base, fit, this_process(), in_place=True) == tmp_path / "checkpoints_2"


def test_each_fit_finds_its_own_whatever_the_order(tmp_path: Path) -> None:
    base = tmp_path / "checkpoints"
    names = ["A 1 at x.py:1", "B 2 at x.py:2", "A 1 at x.py:1"]
    first = [folder_of_fit(base, name, "first", in_place=True) for name in names]
    assert first == [base, tmp_path / "checkpoints_2", tmp_path / "checkpoints_3"]
    assert folder_of_fit(base, names[1], "second", in_place=True) == first[1]
    assert folder_of_fit(base, "A 1 at x.py:9", "second", in_place=True) == tmp_path / "checkpoints_4"
    assert folder_of_fit(base, "A 1 at x.py:9", "third", in_place=False) == base


def test_a_folder_that_nobody_has_named_is_taken_and_a_torn_name_counts_as_none(tmp_path: Path) -> None:
    base = tmp_path / "checkpoints"
    put_checkpoint(base, 1)
    (base / "fit.json").write_text("{")
    assert folder_of_fit(base, "A at x.py:1", "first", in_place=True) == base


def test_another_runs_folder(tmp_path: Path) -> None:
    put_checkpoint(tmp_path / "a", 1, run_id="theirs")
    assert [is_of_this_run(tmp_path / "a", run) for run in ("ours", "theirs", None)] == [False, True, True]
    assert is_of_this_run(tmp_path / "none", "ours")
