"""Learning rates that follow a loss: the same on all ranks, or the ranks are told that they have come apart."""

from __future__ import annotations

import pytest
from tests.multiprocess.conftest import RunJob


def test_ranks_that_follow_losses_of_their_own(run_job: RunJob) -> None:
    job = run_job("apart.py", nodes=2)
    assert job.exit_code == 0, job.output
    together, alike, apart = (job.each(name) for name in ("together", "alike", "apart"))
    assert [each["said"] for each in together + alike] == [[]] * 4
    assert alike[0] == alike[1]
    assert alike[0]["best"] == pytest.approx(together[0]["best"], rel=1e-6), "the mean of the ranks"
    assert alike[0]["rate"] == together[0]["rate"]
    assert apart[0]["best"] != apart[1]["best"], "stock Lightning"
    (said,) = apart[0]["said"]
    assert "ReduceLROnPlateau follows another 'followed' on each rank" in said
    assert "self.log('followed', value, sync_dist=True)" in said
    assert apart[1]["said"] == []
