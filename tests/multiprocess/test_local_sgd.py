"""azureml_local_sgd on two emulated nodes: an oracle's weights in one process, after every step of every replica."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.multiprocess.conftest import Job, RunJob, scripts_on_path
from tests.strategies.local_sgd import reference
from tests.strategies.local_sgd.test_reference import LAYERS, PUBLISHED

# All is computed in float64; sums over ranks are taken in another order.
TOLERANCE = 1e-12
CASES = pytest.mark.parametrize("cases", ["one of each kind", pytest.param("all", marks=pytest.mark.exhaustive)])


@pytest.mark.slow
@CASES
def test_two_replicas(run_job: RunJob, cases: str) -> None:
    """One job for all of it, as a process group costs more than a training."""
    job = run_job("local_sgd.py", cases, "numbers", "equalities", "torchft", "traffic", nodes=2)
    assert job.exit_code == 0, job.output
    check_numbers(job, cases)
    check_equalities(job)
    check_torchft(job)
    check_traffic(job)


@pytest.mark.slow
@CASES
def test_one_replica(run_job: RunJob, cases: str) -> None:
    """By the same oracle: it averages with nobody, and an outer step still goes from where its period began."""
    job = run_job("local_sgd.py", cases, "numbers")
    assert job.exit_code == 0, job.output
    check_numbers(job, cases)


def check_numbers(job: Job, cases: str) -> None:
    with scripts_on_path():
        from local_sgd_cases import CASES, CHOSEN
    names, in_parts = CHOSEN[cases]
    for name in (*names, *(f"{name}, in parts" for name in in_parts)):
        case, ranks = CASES[name.removesuffix(", in parts")], [results[name] for results in job.each("numbers")]
        for number, (found, expected) in enumerate(zip(ranks, replayed(case, ranks), strict=True)):
            assert_close(found["weights"], expected, f"{name}, rank {number}")
        own = torch.tensor([rank["weights"][-1] for rank in ranks], dtype=torch.float64)
        for rank in ranks:
            assert rank["final"] == pytest.approx(own.mean(0).tolist(), abs=TOLERANCE), f"{name}: the mean at the end"
        assert ranks[0]["final"] == ranks[-1]["final"], name


def replayed(case: Any, ranks: list[dict[str, Any]]) -> list[list[list[float]]]:
    """What the oracle makes of what each rank has read."""
    with scripts_on_path():
        from common import Rows
        from replicas import Replica
    rows, trainer = Rows().rows, case.trainer
    modules = [Replica(**case.module) for _ in ranks]
    reads = [[rows[batch] for batch in rank["read"]] for rank in ranks]
    how = trainer.get("accumulate_grad_batches", 1), trainer.get("gradient_clip_val")
    return reference.train(modules, reference.Rules(**case.strategy), reads, *how)


def assert_close(found: list[list[float]], expected: list[list[float]], what: str) -> None:
    assert len(found) == len(expected), what
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, abs=TOLERANCE), f"{what}, after batch {step}"


def check_equalities(job: Job) -> None:
    for rank in job.each("equalities"):
        assert len(rank["every step"]["weights"]) == 20
        assert_close(rank["every step"]["weights"], rank["ddp"]["weights"], "a period of one step is DDP")
        assert rank["all in warm-up"]["weights"][:12] == rank["ddp, adamw"]["weights"][:12], "to the last bit"
        assert rank["all in warm-up"]["weights"][12] != rank["ddp, adamw"]["weights"][12]
    check_same_rows([rank["same rows"] for rank in job.each("equalities")])
    without_momentum, plain = (job.results[0]["numbers"][name] for name in ("outer without momentum", "plain"))
    assert_close(without_momentum["weights"], plain["weights"], "an outer step of 1 is the average")


def check_same_rows(ranks: list[dict[str, Any]]) -> None:
    """Two replicas that read the same are one process."""
    with scripts_on_path():
        from local_sgd_cases import ADAMW, Case
    alone = replayed(Case({"period": 4}, {"gradient_clip_val": 0.5}, ADAMW), ranks[:1])[0]
    for rank in ranks:
        assert_close(rank["weights"], alone, "one process")


def check_torchft(job: Job) -> None:
    """After each step, as torchft has published it for both replicas; before the first both weights are 1."""
    for rank in job.each("torchft"):
        for history, published in zip(rank["histories"], PUBLISHED, strict=True):
            assert history == [list(each) for each in zip(*(published[name][1:] for name in LAYERS), strict=True)]


def check_traffic(job: Job) -> None:
    """Bytes by the kernel's count: steps between exchanges send none, but for a greeting at the start of an epoch."""
    for rank in job.each("traffic"):
        by_step = {name: [after - before for before, after in pairwise(counts)] for name, counts in rank.items()}
        total = {name: sum(counts) for name, counts in by_step.items()}
        for name in ("plain", "outer", "bf16", "int8"):
            busy = {step: count for step, count in enumerate(by_step[name], 1) if count > 1000}
            assert list(busy) == [16, 32], name
            assert total[name] - sum(busy.values()) < 1000, name
        for name in ("plain", "outer", "fragments"):
            assert total["ddp"] >= 15 * total[name], name
        assert total["ddp"] >= 15 * 1.9 * total["bf16"]
        assert total["ddp"] >= 15 * 3.5 * total["int8"]
