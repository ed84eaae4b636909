"""Checkpoints of replicas: the same ranks go on bit for bit, others from the averages; saving changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multiprocess.conftest import Job, RunJob, scripts_on_path

from azureml_strategy.checkpoint.consolidate import consolidate

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

BY_HAND, VALIDATED, OWN = 9, 12, 14
# The first three are one of each kind; from these, other numbers of ranks go on.
RULES = (
    *("outer", "under way", "int8, outer, fragments"),
    *("plain", "int8", "staleness one", "mixing", "in the warm-up", "own schedule"),
)
TOLERANCE = 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(RULES[:3], id="one of each kind"),
        pytest.param(RULES, id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_checkpoints(run_job: RunJob, tmp_path: Path, rules: tuple[str, ...]) -> None:
    """One test, as all go on from what one job has written."""
    job = run_job("local_sgd_checkpoints.py", "write", *rules, nodes=2)
    assert job.exit_code == 0, job.output
    for name in rules:
        check_exact(name, [rank["rules"][name] for rank in job.each("write")])
    check_exact("job checkpoint", [rank["job checkpoint"] for rank in job.each("write")])
    for name in set(rules) & {"plain", "outer", "under way"}:
        check_averages(job, tmp_path / "saved", name)
    check_others(job)
    check_refused(job)
    for ranks in (1, 3):
        elsewhere = run_job("local_sgd_checkpoints.py", "elsewhere", *rules[:3], nodes=ranks)
        assert elsewhere.exit_code == 0, elsewhere.output
        check_elsewhere(job, [elsewhere.results[rank]["elsewhere"] for rank in range(ranks)])
        # One rank has nothing to sort, three have, where gradients are summed.
        summed = {"in the warm-up": ranks > 1, "ddp": ranks > 1}
        assert elsewhere.results[0]["elsewhere"]["warned"] == {"apart": False, **summed}


def mean(lists: list[list[float]]) -> Any:
    return pytest.approx(torch.tensor(lists, dtype=torch.float64).mean(0).tolist(), abs=TOLERANCE)


def check_exact(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        undisturbed = rank["undisturbed"]
        assert len(set(undisturbed["steps"])) == 24
        assert rank["saving"]["steps"] == undisturbed["steps"], f"{name}: saving has no effect"
        assert rank["saving"]["final"] == undisturbed["final"], name
        for step, resumed in rank["resumed"].items():
            assert resumed["steps"] == undisturbed["steps"][int(step) :], f"{name}, from step {step}"
            assert resumed["final"] == undisturbed["final"], f"{name}, from step {step}"


def check_averages(job: Job, folder: Path, name: str) -> None:
    """`averaged.ckpt` is an ordinary file with the means, also when `consolidate` has made it."""
    with scripts_on_path():
        from replicas import Replica, values
    own = [rank["rules"][name]["saving"]["weights"] for rank in job.each("write")]
    for step, place in ((BY_HAND, ""), (VALIDATED, "validated"), (OWN, "")):
        path = folder / name / place / f"step={step}.ckpt"
        loaded = Replica.load_from_checkpoint(path / "averaged.ckpt", batch_norm=True)
        assert values(loaded) == mean([rank[str(step)] for rank in own]), f"{name}, step {step}"
        assert sorted(file.name for file in path.iterdir()) == ["averaged.ckpt", "rank_00000.pt", "rank_00001.pt"]
    consolidate(path, folder / f"{name}.ckpt")
    assert values(Replica.load_from_checkpoint(folder / f"{name}.ckpt", batch_norm=True)) == values(loaded)


def check_others(job: Job) -> None:
    own = [rank["rules"]["outer"]["saving"]["weights"][str(OWN)] for rank in job.each("write")]
    for rank in (each["others"] for each in job.each("write")):
        assert rank["other rules"]["started"] == mean(own)
        assert rank["to ddp"]["started"] == mean(own)
        assert rank["tested"]["weights"] == mean(own)
        for name in ("from ddp", "to ddp", "other rules"):
            assert len(rank[name]["steps"]) == 24 - OWN, name
    first, second = (each["others"] for each in job.each("write"))
    for name in ("from ddp", "to ddp", "other rules"):
        assert first[name]["started"] == second[name]["started"], name
        if name != "to ddp":  # whose ranks have statistics of their own in the end
            assert first[name]["final"] == second[name]["final"], name


def check_refused(job: Job) -> None:
    for rank, refused in enumerate(each["refused"] for each in job.each("write")):
        assert "lacks rank_00001.pt" in refused["lacks"]
        assert "averaged.ckpt alone starts from the averages" in refused["lacks"]
        assert f"rank_0000{rank}.pt is of step 9, but averaged.ckpt beside it of step 14" in refused["mixed"]


def check_elsewhere(job: Job, ranks: list[dict[str, Any]]) -> None:
    """All start from the averages, with the outer optimizer as it was, and end with the same weights."""
    for name in ranks[0]["resumed"]:
        own = [rank["rules"][name]["saving"]["weights"][str(OWN)] for rank in job.each("write")]
        for rank in ranks:
            resumed = rank["resumed"][name]
            assert resumed["started"] == mean(own), name
            assert resumed["common"] == rank["common"][name], name
            assert any(resumed["common"]["momentum"])
            assert resumed["final"] == ranks[0]["resumed"][name]["final"], name
            # The longer an epoch of one rank, the more steps of it are left.
            assert len(resumed["steps"]) > 0
