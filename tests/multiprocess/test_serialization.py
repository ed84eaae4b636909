"""Checkpoints of values of all kinds under each strategy: a restart loads them, and so does torch without pickles."""

from __future__ import annotations

import pytest
from tests.multiprocess.conftest import RunJob

# Stage 3 keeps more apart than stage 2, and the one file is read as DDP's is.
MORE = [pytest.param(each, marks=pytest.mark.exhaustive) for each in ("stage_2", "one_file")]
STRATEGIES = ["ddp", "stage_3", "model_parallel", "pipeline", *MORE]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_get_back_what_they_kept(run_job: RunJob, strategy: str) -> None:
    job = run_job("keeps.py", strategy, nodes=2)
    assert job.exit_code == 0, job.output
    assert [job.results[rank] for rank in (0, 1)] == 2 * [
        {"wrong": [], "consolidated": True, "weights": True, "rates": True}
    ]
