"""What was compiled outlives the processes of a job, and its nodes: the next attempt compiles nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.multiprocess.conftest import SCRIPTS, Job, RunJob


class Attempts:
    """Attempts of one job, each in processes and with a disk of its own, whose C++ compiler is watched."""

    def __init__(self, run_job: RunJob, folder: Path) -> None:
        self._run_job, self._folder = run_job, folder
        self.root = folder / "root"
        self.file = self.root / "compile_cache" / "node0.bin"

    def attempt(
        self, number: int, strategy: str, end: str, *factors: float, extra: Mapping[str, str] | None = None, **size: int
    ) -> Job:
        disk = self._folder / f"disk{number}"
        disk.mkdir()
        compiler = disk / "g++"
        compiler.write_text(f'#!/bin/sh\necho "$@" >> {disk}/calls\nexec {shutil.which("g++")} "$@"\n')
        compiler.chmod(0o700)
        variables = {
            "TMPDIR": str(disk),
            "PYTHONPATH": str(SCRIPTS.parents[2]),  # of `tests`, which a fresh interpreter does not know
            "PATH": f"{disk}:{os.environ['PATH']}",
            "CXX": "g++",
            # A header for all kernels, and trials of instruction sets, take longer than these kernels.
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        return self._run_job(
            "compile_cache.py",
            *(self.root, strategy, end, *(factors or [1.0])),
            # not of the process that has torch's compiler already
            **{"fresh": True, "extra": variables | dict(extra or {}), "without": ["TORCHINDUCTOR_CACHE_DIR"], **size},
        )

    def libraries(self, number: int) -> int:
        """How many libraries an attempt's C++ compiler has made."""
        calls = self._folder / f"disk{number}" / "calls"
        return sum("-shared" in line.split() for line in calls.read_text().splitlines()) if calls.exists() else 0

    def left_on_disk(self, number: int) -> list[str]:
        return [each.name for each in (self._folder / f"disk{number}").glob("azureml_strategy_compiled_*")]


@pytest.fixture
def attempts(run_job: RunJob, tmp_path: Path) -> Attempts:
    return Attempts(run_job, tmp_path)


def missed(job: Job) -> list[int]:
    """How many graphs each rank has compiled, by torch's counters."""
    names = ("fxgraph_cache_miss", "fxgraph_cache_bypass", "autograd_cache_miss", "autograd_cache_bypass")
    each = [job.results[rank] for rank in sorted(job.results)]
    return [sum((rank["inductor"] | rank["aot_autograd"]).get(name, 0) for name in names) for rank in each]


def hits(job: Job) -> list[int]:
    return [job.results[rank]["inductor"].get("fxgraph_cache_hit", 0) for rank in sorted(job.results)]


@pytest.mark.exhaustive
def test_after_a_kill_nothing_is_compiled(attempts: Attempts) -> None:
    killed = attempts.attempt(0, "ddp", "killed")
    assert killed.exit_code != 0
    assert (missed(killed)[0] > 0, attempts.libraries(0) > 0) == (True, True)
    again = attempts.attempt(1, "ddp", "whole")
    assert again.exit_code == 0, again.output
    assert "Loaded the compiled code of an earlier attempt" in again.output
    assert (missed(again), attempts.libraries(1)) == ([0], 0), again.results
    assert hits(again) == [missed(killed)[0] - killed.results[0]["aot_autograd"]["autograd_cache_miss"]]
    assert again.each("losses") == killed.each("losses")
    assert attempts.left_on_disk(1) == []


CASES = [
    ("ddp", {"processes_per_node": 2}),
    ("ddp", {"nodes": 2}),
    ("zero_2", {"processes_per_node": 2}),
    ("model_parallel", {"processes_per_node": 2}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("strategy", "size"), CASES)
def test_of_several_ranks(attempts: Attempts, strategy: str, size: dict[str, int]) -> None:
    attempts.attempt(0, strategy, "killed", **size)
    nodes = size.get("nodes", 1)
    assert sorted(each.name for each in attempts.file.parent.iterdir()) == [f"node{node}.bin" for node in range(nodes)]
    again = attempts.attempt(1, strategy, "whole", **size)
    assert again.exit_code == 0, again.output
    assert (missed(again), attempts.libraries(1)) == ([0, 0], 0), again.results
    assert attempts.left_on_disk(1) == []


@pytest.mark.exhaustive
def test_ranks_of_a_node_that_compile_different_graphs(attempts: Attempts) -> None:
    attempts.attempt(0, "ddp", "killed", 1.0, 2.0, processes_per_node=2)
    again = attempts.attempt(1, "ddp", "whole", 1.0, 2.0, processes_per_node=2)
    assert (missed(again), attempts.libraries(1)) == ([0, 0], 0), again.results


@pytest.mark.exhaustive
def test_a_new_node_takes_what_node_0_has_kept(attempts: Attempts) -> None:
    attempts.attempt(0, "ddp", "killed")
    again = attempts.attempt(1, "ddp", "whole", nodes=2)
    assert (missed(again), attempts.libraries(1)) == ([0, 0], 0), again.results


@pytest.mark.exhaustive
def test_damaged_code_is_compiled_again_and_kept_anew(attempts: Attempts) -> None:
    attempts.attempt(0, "ddp", "killed")
    whole = attempts.file.read_bytes()
    attempts.file.write_bytes(whole[:-100])
    again = attempts.attempt(1, "ddp", "whole")
    assert again.exit_code == 0
    assert "node0.bin is not loaded, and will be replaced: its checksum is wrong." in again.output
    assert missed(again)[0] > 0
    assert missed(attempts.attempt(2, "ddp", "whole")) == [0]


@pytest.mark.exhaustive
def test_the_switch(attempts: Attempts) -> None:
    done = attempts.attempt(0, "ddp", "whole", extra={"AZUREML_STRATEGY_COMPILE_CACHE": "off"})
    assert (done.exit_code, attempts.root.exists()) == (0, False)
