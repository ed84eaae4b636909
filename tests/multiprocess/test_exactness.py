"""Two ranks whose learning rates come apart are told so; those that follow the same value are not."""

from __future__ import annotations

from tests.multiprocess.conftest import RunJob


def test_ranks_that_follow_losses_of_their_own(run_job: RunJob) -> None:
    job = run_job("apart.py", nodes=2)
    assert job.exit_code == 0, job.output
    assert job.each("together") == [[], []]
    (said,), of_the_other = job.each("apart")
    assert "ReduceLROnPlateau follows another 'followed' on each rank" in said
    assert "self.log('followed', value, sync_dist=True)" in said
    assert of_the_other == []
