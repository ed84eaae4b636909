"""Lightning's features under azureml_local_sgd on two emulated nodes: they see averages, and training goes on apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.multiprocess.conftest import Job, RunJob

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

TOLERANCE = 1e-12


@pytest.mark.slow
def test_features(run_job: RunJob) -> None:
    job = run_job("local_sgd_features.py", nodes=2)
    assert job.exit_code == 0, job.output
    check_validation(job)
    check_logging(job)
    check_early_stopping(job)
    check_finetuning(job)
    check_follower(job)
    check_half_precision(job)
    check_periods(job)
    check_unaware(job)
    check_evaluations(job)
    check_uneven(job)
    check_learning_rate(job)


def mean(lists: list[list[float]]) -> Any:
    return pytest.approx(torch.tensor(lists, dtype=torch.float64).mean(0).tolist(), abs=TOLERANCE)


def check_validation(job: Job) -> None:
    """It sees the mean of parameters and statistics; each replica goes on from its own, as if it had not been."""
    ranks = job.each("validation")
    for name in ("validated", "plain"):
        first, second = (rank[name] for rank in ranks)
        assert len(first["validated"]) >= 6
        for (step, seen), (_, seen_too) in zip(first["validated"], second["validated"], strict=True):
            own = [first["weights"][step - 1], second["weights"][step - 1]]
            assert seen == seen_too == mean(own), f"{name}, after step {step}"
            assert (own[0] != own[1]) == (name == "validated"), "a plain period has just ended"
        assert first["final"] == second["final"] == mean([first["weights"][-1], second["weights"][-1]])
    for rank in ranks:
        validated = rank["validated"]
        resumed = [validated["weights"][step - 1] for step, _ in validated["validated"]]
        assert validated["after_validation"] == resumed[: len(validated["after_validation"])]
        for key in ("weights", "losses", "final"):
            assert validated[key] == rank["not validated"][key], key


def check_logging(job: Job) -> None:
    first, second = (part["logged"] for part in job.each("logging"))
    for (own, both), (own_too, both_too) in zip(first, second, strict=True):
        assert both == both_too == pytest.approx((own + own_too) / 2)


def check_early_stopping(job: Job) -> None:
    """All replicas stop at the second validation, with the same weights."""
    first, second = job.each("early_stopping")
    assert first["steps"] == 6
    assert first == second


def check_finetuning(job: Job) -> None:
    """A backbone that joins in the second epoch is averaged from the next period on."""
    for name in ("plain", "diloco"):
        first, second = (part[name] for part in job.each("finetuning"))
        assert len(first) == 24
        assert first[:8] == second[:8] == [first[0]] * 8, "it was frozen"
        apart = [one != other for one, other in zip(first, second, strict=True)]
        assert all(apart[8:12]), name
        # Under DiLoCo its parts, of two, arrive at steps 15 and 18 of the third period.
        assert not apart[17] or name == "diloco", name
        assert not apart[23] or name == "diloco", name
        assert apart[13]
        assert apart[19]


def check_follower(job: Job) -> None:
    first, second = job.each("follower")
    assert first["own"] != second["own"]
    assert first["final"] == second["final"]
    halves = [(one + other) / 2 for one, other in zip(first["own"], second["own"], strict=True)]
    assert first["final"] == pytest.approx(halves, abs=1e-6)


def check_half_precision(job: Job) -> None:
    for rank in job.each("half_precision"):
        half, whole = rank["bf16-mixed"], rank["32-true"]
        assert half["kinds"] == ["torch.float32"]
        assert half["losses"] != whole["losses"]
        assert half["losses"][:8] == pytest.approx(whole["losses"][:8], rel=0.1)
        assert sum(half["losses"][-8:]) < sum(half["losses"][:8])
    first, second = (part["bf16-mixed"]["parameters"] for part in job.each("half_precision"))
    assert first == second, "at the end of the training"


def check_periods(job: Job) -> None:
    ranks = job.each("periods")
    assert equal_after(ranks, "growing") == [*range(1, 7), 8, 10, 12, 16, 20, 24]
    # (0.08 / 0.05)^2 = 2.56; at 0.025 10.24, of which 6 are allowed. The rate is that of the step before the period.
    assert equal_after(ranks, "quadratic") == [2, 4, 6, 8, 10, 16, 22]
    # Two steps of warm-up; the lengths are 3 after 0 steps, 4 after 3, 4 after 7, 4 after 11, ...
    assert equal_after(ranks, "own") == [1, 2, 5, 9, 13, 17, 21]


def equal_after(ranks: list[dict[str, Any]], name: str) -> list[int]:
    """After which steps both replicas have the same weights."""
    pairs = zip(*(rank[name] for rank in ranks), strict=True)
    return [step for step, (one, other) in enumerate(pairs, 1) if one == other]


def check_unaware(job: Job) -> None:
    ranks = job.each("unaware")
    for rank in ranks:
        spread = rank["spread"]
        assert [step for step, apart in enumerate(spread, 1) if apart == 0] == list(range(4, 25, 4))
        assert rank["steps"] == 24, "whole numbers stay as they are"
        assert rank["mask"] == [torch.finfo(torch.float32).min] * 2, "a sum of two of them would be infinite"
        assert rank["statistic"] == 0.5


def check_evaluations(job: Job) -> None:
    first, second = job.each("evaluations")
    assert first["validated"] == second["validated"]
    assert first["tested"] == second["tested"]
    for words in (first["refused"], second["refused"]):
        assert words.startswith("ConfigurationError: These nodes have InfiniBand (mlx5_ib0)")
    assert first["predicted"] + second["predicted"] == 64


def check_learning_rate(job: Job) -> None:
    """Nothing of the search is left: neither the steps of the warm-up nor what the replicas had in common."""
    ranks = job.each("learning_rate")
    assert ranks[0]["found"] == ranks[1]["found"]
    for rank in ranks:
        assert rank["searched"]["steps"] == rank["given"]["steps"] == 24
        assert rank["searched"]["weights"][-24:] == rank["given"]["weights"]
        assert rank["searched"]["final"] == rank["given"]["final"] == ranks[0]["given"]["final"]


def check_uneven(job: Job) -> None:
    """Both ranks say at which step each is, or how many batches it has, wherever they find out."""
    places = {
        "at the next epoch": "rank 0: after step 5 (exchange 3.1 of 0 numbers, period 8); rank 1: after step 7 ",
        "at an exchange": "rank 0: after step 5 (exchange 3.1 of 0 numbers, period 6); rank 1: after step 6 ",
        "at an arrival": "rank 0: after step 5 (exchange 3.1 of 0 numbers, period 6); rank 1: after step 7 ",
        "at the end": "rank 0: after step 5 (exchange 2.0 of 161 numbers, period 16); rank 1: after step 7 ",
    }
    for told in job.each("uneven"):
        assert told["known"].startswith("ConfigurationError: The ranks have unequal numbers of batches in an epoch")
        assert "rank 0 has 5, rank 1 has 7" in told["known"]
        assert "Trainer(limit_train_batches=5)" in told["known"]
        for name, words in places.items():
            assert told[name].startswith("RanksApartError: "), told[name]
            assert words in told[name]
            assert "limit_train_batches=N for iterable data" in told[name]
        assert told["even"] == told["one step for a try"] == ""
