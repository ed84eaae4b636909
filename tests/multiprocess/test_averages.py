"""Over unequal numbers of samples and labels, each strategy gives the numbers of one process of stock Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multiprocess.conftest import Job, RunJob, scripts_on_path
from tests.tiny_model import save_tiny_model
from torch import Tensor

_CASES = [
    (1, "ddp"),
    (2, "ddp;zero_2;zero_3;tensor;pipeline;local"),
    pytest.param(2, "zero_1;sharded;sequence", marks=pytest.mark.exhaustive),
    pytest.param(4, "ddp;tensor;pipeline", marks=pytest.mark.exhaustive),
]
_FABRIC = ("fabric azureml_ddp", "fabric azureml_deepspeed", "fabric azureml_model_parallel")
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("averages") / "tiny", vocabulary=16)


@pytest.fixture(scope="module")
def alone(model: Path) -> Facts:
    """The numbers of one process under stock Lightning, which accumulates nothing."""
    with scripts_on_path():
        import averages

        learned = {kind: averages.learned(kind, "auto", str(model), 1, 1) for kind in ("tokens", "images", "chats")}
        return {"logged": averages.logged("auto"), **learned, "chunks": learned["chats"]}


@pytest.mark.parametrize(("ranks", "strategies"), _CASES)
def test_every_mean_is_that_of_one_process(
    run_job: RunJob, model: Path, alone: Facts, ranks: int, strategies: str
) -> None:
    names, fabric = strategies.split(";"), _FABRIC if ranks == 2 else ()
    job = run_job("averages.py", ranks, model, *names, *fabric, processes_per_node=ranks)
    assert job.exit_code == 0, job.output
    for rank, results in job.results.items():
        for name in names:
            _compare(f"{name} on rank {rank} of {ranks}", results[name], alone, ranks)
    _check_fabric(job, fabric, ranks)


def _compare(where: str, results: Facts, alone: Facts, ranks: int) -> None:
    for case, found in results.items():
        if case == "logged":
            expected = alone["logged"]["metrics"]
            assert {name: value for name, (_, value) in found["metrics"].items()} == pytest.approx(
                {name: value for name, (_, value) in expected.items()}, rel=1e-6
            ), where
            _check_reductions(where, found["reduced"], ranks)
        else:
            assert found == pytest.approx(alone[case.split()[0]], rel=2e-6), f"{case}: {where}"


def _check_fabric(job: Job, names: tuple[str, ...], ranks: int) -> None:
    for name in names:
        for found in job.each(name):
            _check_reductions(name, found["reduced"], ranks)
            assert found["in_place"] == [4 * (ranks + 1) / 2]


def _check_reductions(where: str, found: Facts, ranks: int) -> None:
    alike = found.pop("alike", 1)
    with scripts_on_path():
        import averages
    for case, (dtype, values) in found.items():
        name, operation = case.split()
        given = [averages.given(name, rank // alike) for rank in range(ranks)]
        # Ranks that are alike count once in a sum over the data, and each by itself in one over ranks.
        expected = _reduced(
            given[::alike] if operation == "sum" else given, operation.removeprefix("ReduceOp.").lower()
        )
        assert dtype == str(expected.dtype), f"{case}: {where}"
        assert values == pytest.approx(expected.double().tolist(), rel=1e-6), f"{case}: {where}"


def _reduced(given: list[Tensor], operation: str) -> Tensor:
    """What torch makes of the values in one process, in float64, in the type that it would give."""
    whole, before = torch.stack(given), given[0].dtype
    if operation in ("mean", "avg"):
        return whole.double().mean(0).to(before if before.is_floating_point else torch.float32)
    if operation == "sum":
        return whole.double().sum(0).to(before if before.is_floating_point else torch.int64)
    return whole.amin(0) if operation == "min" else whole.amax(0)
