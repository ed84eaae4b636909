"""Where the time of steps goes, under each strategy, and ranks that are slower than others."""

from __future__ import annotations

import json

import pytest
from tests.multiprocess.conftest import Job, RunJob


def run(run_job: RunJob, ranks: int = 2, **arguments: object) -> Job:
    job = run_job("breakdown.py", json.dumps(arguments), processes_per_node=ranks)
    assert job.exit_code == 0, job.output
    return job


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "pipeline",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("zero", "zero_2", "model_parallel")),
    ],
)
def test_the_parts_add_up(run_job: RunJob, strategy: str) -> None:
    job = run(run_job, strategy=strategy, validate=True)
    for result in job.results.values():
        shares, wall = result["shares"], result["wall"]
        assert sum(shares.values()) == pytest.approx(1)
        assert {"forward", "backward", "optimizer", "communication", "data_wait", "other", "copy"} <= set(shares)
        assert min(shares.values()) >= 0
        assert shares["forward"] > 0
        assert shares["backward"] > 0
        assert ("bubble" in shares) == (strategy == "pipeline")
        seconds = [value for name, value in wall.items() if name.endswith("_s") and name != "time/wall_s"]
        assert sum(seconds) == pytest.approx(wall["time/wall_s"])
        # By the test's own clock: from the call of `fit` to the last step. The wall clock encloses that: it runs from
        # the process's start to the teardown. And its parts: on a loaded machine, a process may stand still between
        # the two clocks.
        assert wall["time/wall_s"] > result["trained_s"]
        assert wall["time/validation_s"] == pytest.approx(result["validation_s"], rel=0.05, abs=0.5)
        assert wall["time/training_s"] + wall["time/validation_s"] == pytest.approx(
            result["training_s"], rel=0.05, abs=0.5
        )


@pytest.mark.exhaustive
def test_exposed_communication_is_what_the_reducer_says(run_job: RunJob) -> None:
    """DDP times its communication itself; here one rank is slow, so that the other one waits."""
    job = run(run_job, slow_rank=1, compute_s=0.05, reducer=True)
    for result in job.results.values():
        waits, steps = zip(*result["waits"][5:-1], strict=True)
        assert sum(waits) == pytest.approx(sum(result["reducer_s"][5:]), abs=0.05 * sum(steps))


@pytest.mark.parametrize(
    ("cause", "seconds"), [("compute_s", 0.2), pytest.param("data_s", 0.2, marks=pytest.mark.exhaustive)]
)
def test_a_slow_rank_is_named_with_what_it_is_slow_at(run_job: RunJob, cause: str, seconds: float) -> None:
    job = run(run_job, ranks=2, slow_rank=1, **{cause: seconds})
    words = "with computing" if cause == "compute_s" else "with waiting for its data"
    named = job.results[0]["named"]
    assert named
    assert all(text.startswith("Rank 1 (") and words in text for text in named)
    assert "azureml-strategy" in named[0] or "workers" in named[0]
    assert words in job.results[0]["slowest"]
    assert job.results[1]["named"] == []
    early, late = (sum(wait for wait, _ in job.results[rank]["waits"][5:]) for rank in (0, 1))
    assert early > late + seconds  # and not only once in over thirty steps
