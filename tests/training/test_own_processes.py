"""Sweeps in which the strategy starts the second process of each job itself, and jobs that fail on one rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.training.conftest import COMMAND, TINY, files, run

CALLBACK = """
import os
from lightning.pytorch import Callback


class Record(Callback):
    '''Notes each job that a rank trains; rank 0 alone fails in a job of seed 13.'''

    def on_train_batch_end(self, trainer, module, *batch):
        if trainer.global_rank == 0 and os.environ["PL_GLOBAL_SEED"] == "13":
            raise RuntimeError("bad luck")

    def on_fit_end(self, trainer, module):
        with open(f"{trainer.default_root_dir}/{trainer.global_rank}-of-{trainer.world_size}", "a") as file:
            file.write("trained\\n")
"""
RECIPE = """\
defaults: [resnet50_synthetic, {override trainer: cpu}, {override tracking: console}, _self_]
callbacks: {record: {_target_: my_callbacks.Record}}
hydra: {mode: %s}
"""


def sweep(folder: Path, mode: str, *arguments: str, before: Sequence[str] = (), check: bool = True) -> str:
    (folder / "my_callbacks.py").write_text(CALLBACK)
    (folder / "mine.yaml").write_text(RECIPE % mode)
    command = [*before, COMMAND, "train", "mine.yaml", *arguments, *TINY]
    return run(*command, check=check, variables={"PYTHONPATH": str(folder)}).stdout


def assert_one_folder(jobs: int) -> None:
    assert len(files("multirun/*/*")) == 1
    assert files("outputs/**/*") == []
    assert [path.rsplit("/", 2)[1] for path in files("**/.hydra")] == [str(number) for number in range(jobs)]


@pytest.mark.exhaustive
def test_each_job_is_run_once_by_both_ranks(tmp_path: Path) -> None:
    """Stock Lightning starts a further sweep in each process, with a folder of its own."""
    output = sweep(tmp_path, "null", "-m", "seed=1,2")
    assert_one_folder(2)
    trained = files("multirun/*/*/*/*-of-*")
    assert [path.rsplit("/", 2)[1:] for path in trained] == [
        [number, f"{rank}-of-2"] for number in ("0", "1") for rank in (0, 1)
    ]
    assert all(Path(path).read_text() == "trained\n" for path in trained)
    assert output.count("Launching 2 jobs") == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["null", "MULTIRUN"])
def test_a_job_that_fails_on_one_rank_leaves_the_next_alone(tmp_path: Path, mode: str) -> None:
    """Asked for in the file, a sweep has no flag that has to be left out of the second process's command."""
    flags = ["-m"] if mode == "null" else []
    output = sweep(tmp_path, mode, *flags, "seed=13,2", "hydra.job.chdir=true", check=False)
    assert_one_folder(2)
    trained = files("multirun/*/*/*/*-of-*")
    assert [path.rsplit("/", 2)[1:] for path in trained] == [["1", "0-of-2"], ["1", "1-of-2"]]
    assert all(Path(path).read_text() == "trained\n" for path in trained), "once"
    assert output.count("Launching 2 jobs") == 1
    assert "RuntimeError: bad luck" in output
    assert len(re.findall(r"\t#\d : seed=", output)) == 2


def test_a_job_that_fails_on_one_of_the_platforms_ranks_ends_the_sweep(tmp_path: Path) -> None:
    """Rank 0 would be in the second job while rank 1 is in the first, each waiting for the other."""
    emulate = [COMMAND, "emulate", "--processes-per-node", "2", "--"]
    output = sweep(tmp_path, "null", "-m", "seed=13,2", before=emulate, check=False)
    assert "RuntimeError: bad luck" in output
    assert "rank 0 (node 0) ended with exit code 1" in output
    assert "\t#1 : seed=2" not in output
