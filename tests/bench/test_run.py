"""The plan: sizes that fit the backend and the memory, and what is said of it at the start."""

from __future__ import annotations

import pytest
import torch
from tests.bench.conftest import CONDITIONS

from azureml_strategy.bench import BenchError, BenchOptions
from azureml_strategy.bench.measure import Procedure
from azureml_strategy.bench.results import Expectation
from azureml_strategy.bench.run import Plan, _sizes, print_start

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("backend", "largest", "expected"),
    [
        ("gloo", 10 * GIB, [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]),
        ("gloo", 5 * MIB, [64 * KIB, 256 * KIB, MIB, 4 * MIB]),
        ("nccl", 5 * MIB, [64 * KIB, 256 * KIB, MIB, 4 * MIB]),
        ("nccl", 1, [64 * KIB]),
    ],
)
def test_by_default_what_fits(backend: str, largest: int, expected: list[int]) -> None:
    assert _sizes(BenchOptions(), backend, largest) == expected


def test_nccl_goes_up_to_what_health_checks_use() -> None:
    sizes = _sizes(BenchOptions(), "nccl", 60 * GIB)
    assert list(sizes) == sorted(sizes)
    assert (sizes[0], sizes[-2], sizes[-1]) == (64 * KIB, 4 * GIB, 8 * GIB)


def test_pairs_need_one_size() -> None:
    assert _sizes(BenchOptions(pairs=True), "gloo", 10 * GIB) == [16 * MIB]
    assert _sizes(BenchOptions(pairs=True), "nccl", 60 * GIB) == [GIB]
    assert _sizes(BenchOptions(pairs=True, sizes=(1000, 2000)), "gloo", 10 * GIB) == (2000,)


def test_what_the_user_wants_must_fit() -> None:
    assert _sizes(BenchOptions(sizes=(10, MIB)), "gloo", MIB) == (10, MIB)
    with pytest.raises(BenchError, match=r"a message of 2 MiB does not fit: some process has memory for 1\.5 MB"):
        _sizes(BenchOptions(sizes=(10, 2 * MIB)), "gloo", 1_500_000)


def test_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(CONDITIONS, ["all-reduce"], [1 << 20], Procedure(torch.float32, 10, 2), Expectation(None, ""))
    print_start(plan, idle_gpus=0)
    assert capsys.readouterr().out == (
        "Measuring all-reduce of 1 MiB: 3 node(s) x 1 process(es), gloo on CPU, 10 iterations after 2 of warm-up.\n"
    )
    print_start(plan, idle_gpus=7)
    assert "Only 1 GPU(s) of each node take part, 7 do not: set the job's process_count_per_instance to 8" in (
        capsys.readouterr().out
    )
