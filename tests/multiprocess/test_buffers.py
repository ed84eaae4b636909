"""Buffers of ranks are those of DDP, in training, in validations and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.conftest import RunJob

STEPS = 3  # of an epoch, of which there are two
Results = dict[str, Any]


@pytest.mark.slow
def test_two_ranks_have_the_buffers_of_ddp(run_job: RunJob, tmp_path: Path) -> None:
    job = run_job("buffers.py", tmp_path, nodes=2)
    assert job.exit_code == 0, job.output
    first, second = job.results[0], job.results[1]
    expected = first["ddp"]
    assert expected["buffers"][1]["network.2.mean"] != expected["buffers"][0]["network.2.mean"], "it moves"
    for name in ("zero_2", "zero_3", "fsdp2", "fsdp2_recomputing", "pipeline"):
        for rank, oracle in ((first, first["ddp"]), (second, second["ddp"])):
            check_numbers(rank[name], oracle, name)
            check_resumed(rank[f"{name}_again"], rank[name], name)
        assert first[name]["buffers"] == second[name]["buffers"], name


def check_numbers(result: Results, oracle: Results, name: str) -> None:
    assert len(result["losses"]) == 2 * STEPS
    assert result["losses"] == pytest.approx(oracle["losses"], rel=1e-5), name
    assert result["val_loss"] == pytest.approx(oracle["val_loss"], rel=1e-5), name


def check_resumed(again: Results, undisturbed: Results, name: str) -> None:
    assert again["losses"] == undisturbed["losses"][STEPS:], name
    assert again["buffers"] == undisturbed["buffers"][1:], name
