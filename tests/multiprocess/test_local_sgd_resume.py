"""Checkpoints of azureml_local_sgd in the middle of a period: exact, without effect on the training, with averages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.multiprocess.conftest import RunJob


@pytest.mark.slow
def test_a_resumed_training_is_the_uninterrupted_one(run_job: RunJob, tmp_path: Path) -> None:
    job = run_job("local_sgd_resume.py", tmp_path / "checkpoints", nodes=2)
    assert job.exit_code == 0, job.output
    for name, of_rank_0 in job.results[0].items():
        ranks = [of_rank_0, job.results[1][name]]
        for rank in ranks:
            whole, resumed = rank["whole"], rank["resumed"]
            assert whole["weights"] == rank["unsaved"]["weights"], f"{name}: saving changes nothing"
            assert resumed["weights"] == whole["weights"][16:], name
            assert resumed["losses"] == whole["losses"][16:], name
            assert resumed["final"] == whole["final"], name
            assert rank["files"] == ["averaged.ckpt", "rank_00000.pt", "rank_00001.pt"]
        own = torch.tensor([rank["whole"]["weights"][15] for rank in ranks], dtype=torch.float64)
        assert not torch.equal(own[0], own[1]), "in the middle of a period"
        assert ranks[0]["averaged"] == ranks[1]["averaged"] == pytest.approx(own.mean(0).tolist(), abs=1e-12), name
        # With other rules all replicas start from the averages, and end together.
        assert ranks[0]["other_rules"] == ranks[1]["other_rules"] != ranks[0]["whole"]["final"], name
