"""Communication settings that are measured before the first step, on two emulated nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.conftest import RunJob

SAME = ("seen", "calls", "parameters", "statistics", "random", "logged")


@pytest.mark.parametrize("part", ["exact", pytest.param("exact_more", marks=pytest.mark.exhaustive)])
def test_a_tuned_training_is_the_untuned_one_and_a_later_run_takes_its_settings(
    run_job: RunJob, tmp_path: Path, part: str
) -> None:
    job = run_job("tuning.py", part, tmp_path, nodes=2)
    assert job.exit_code == 0, job.output
    first, second = job.results[0], job.results[1]
    for name, run in first.items():
        assert run["pick"] == second[name]["pick"], "the ranks agree"
        assert run["parameters"] == second[name]["parameters"]
        assert run["held"], "of the model that a callback holds no hook is left"
        other = first["half untuned" if name.startswith("half") else "untuned"]
        for key in SAME:
            assert run[key] == other[key], f"{name}: {key}"
    assert first["untuned"]["pick"] is None
    more = part == "exact_more"
    for name in ("tuned", *(("half tuned", "named") if more else ())):
        check_pick(first[name])
    for name in ("restarted", "read"):
        assert first[name]["measured"] == first["tuned"]["measured"], "it was not measured again"
        assert first[name]["pick"] == first["tuned"]["pick"]
        assert first[name]["bucket_bytes"] == first["tuned"]["bucket_bytes"]
    assert first["otherwise"]["measured"] != first["tuned"]["measured"], "another default was given"
    assert sorted(each.name for each in tmp_path.rglob("*.json") if "results" not in each.parts) == (
        ["mine.json", "tuned_ddp.json", "tuned_ddp.json"] if more else ["tuned_ddp.json"]
    )
    assert "Communication settings of DDP (2 ranks" in job.output
    assert "without communication" in job.output
    assert "Takes the communication settings that" in job.output


def check_pick(run: dict[str, Any]) -> None:
    """A bucket for each layer loses to all other sizes."""
    assert run["pick"]["bucket_cap_mb"] != 0.0001, run["why"]
    assert run["pick"]["gradient_compression"] is None
    assert not run["pick"]["static_graph"]
    assert run["bucket_bytes"] >= 2**20
    assert run["rows"] >= 3
    # On a busy machine ranks are looked at again without communication (17 passes each time), and eight pairs decide.
    assert run["passes"] <= 150
    assert "tune/speedup" in run["metrics"]


def test_compression_with_several_buckets_and_in_a_search(run_job: RunJob, tmp_path: Path) -> None:
    job = run_job("tuning.py", "compressed", tmp_path, nodes=2)
    assert job.exit_code == 0, job.output
    for name in ("powersgd", "searched"):
        first, second = (job.results[rank][name] for rank in (0, 1))
        assert first["parameters"] == second["parameters"]
        assert first["pick"] == second["pick"]
    assert job.results[0]["searched"]["pick"]["gradient_compression"] in (None, "bf16")
    assert "gradients rounded to 8 bits" in job.output


def test_what_cannot_be_tuned_trains_as_it_is_and_says_why(run_job: RunJob, tmp_path: Path) -> None:
    job = run_job("tuning.py", "refused", tmp_path, nodes=2)
    assert job.exit_code == 0, job.output
    first = job.results[0]
    for name, words in {
        "Straggler": "rank 1 computes for",
        "Locked": "the module or the batch cannot be copied (TypeError: cannot pickle '_thread.lock' object)",
        "Manual": "the module optimizes manually",
        "Bound": "a copy of the module does not train its own parameters",
    }.items():
        assert words in first[name]["why"]
        assert any(words in each and "stay as they are" in each for each in first[name]["warnings"])
        assert first[name]["pick"] == job.results[1][name]["pick"]
        assert first[name]["calls"] is not None
    assert first["files"] == [], "what was not measured is not written"
    for rank in (0, 1):
        assert "world_size 64, and here 2" in job.results[rank]["world_size"]
        assert "model Other 1, and here Deep" in job.results[rank]["model"]
        assert "devices 2 x H100, and here 2 x cpu" in job.results[rank]["devices"]
        assert "precision x, and here 32-true" in job.results[rank]["precision"]
        words = "batch float32 [9, 8], int64 [9], and here float32 [4, 8], int64 [4]"
        assert words in job.results[rank]["batch"]
        again = job.results[rank]["again"]
        assert again["measured"] is not None
        assert again["calls"] == 2
    assert "are for another batch, and are measured anew" in job.output


@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_trial_that_fails_on_one_rank_leaves_the_training_as_it_is_on_all(
    run_job: RunJob, tmp_path: Path, nodes: int
) -> None:
    job = run_job("tuning.py", "failing", tmp_path, nodes=nodes)
    assert job.exit_code == 0, job.output
    for name, words in {
        "Failing": "has failed (RuntimeError: no memory) on rank 1",
        "FailingInBackward": "has failed (OutOfMemoryError: no memory) on rank 0",
        "FailingAtOnce": "a trial without communication has failed (AssertionError: this is a trial) on rank",
    }.items():
        for rank in range(nodes):
            run = job.results[rank][name]
            assert words in run["why"]
            for key in SAME:
                assert run[key] == job.results[rank]["untuned"][key], f"{name}, rank {rank}: {key}"
        assert any("not tuned" in each and words in each for each in job.results[0][name]["warnings"])
    assert job.results[0]["tuned"]["parameters"] == job.results[0]["untuned"]["parameters"]
