"""Sizes, times and bandwidths of one collective; what three ranks measure is in tests/multiprocess."""

from __future__ import annotations

import itertools
import statistics
import time

import pytest
import torch
from torch import Tensor

from azureml_strategy.network.collectives import COLLECTIVES, Place, Procedure, Unavailable, measure
from azureml_strategy.network.collectives.operations import AllReduce, Broadcast

FAST = Procedure(torch.float32, iterations=3, warmup=1)


class Counted(Broadcast):
    """Takes known times, and keeps what it is run on."""

    def __init__(self, *milliseconds: float) -> None:
        self.times = itertools.chain([0], milliseconds)  # the check comes first
        self.sums: list[float] = []

    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        self.sums.append(float(sent.abs().sum()))
        time.sleep(next(self.times) / 1e3)


def test_warm_up_is_left_out_and_the_middle_counts(alone: Place) -> None:
    collective = Counted(200, 150, 40, 10, 20)
    found = measure(collective, alone, 4000, Procedure(torch.float32, iterations=3, warmup=2))
    assert 0.010 <= found.min_s < found.median_s < found.max_s < 0.1
    assert 0.020 <= found.median_s < 0.035
    assert found.median_s < found.p95_s <= found.max_s
    assert found.algorithm_bandwidth == pytest.approx(4000 / found.median_s / 1e9)
    assert collective.sums[0] > 0, "checked with data"
    assert collective.sums[1:] == [0] * 5, "timed with zeros, which no sum can make infinite"


def test_percentile_of_many_and_of_one(alone: Place) -> None:
    one = measure(Counted(5), alone, 4, Procedure(torch.float32, iterations=1, warmup=0))
    assert one.median_s == one.p95_s == one.min_s == one.max_s
    many = measure(Counted(*range(1, 22)), alone, 4, Procedure(torch.float32, iterations=21, warmup=0))
    assert 0.020 <= many.p95_s < many.max_s
    assert 0.011 <= many.median_s < 0.016


@pytest.mark.parametrize(
    ("size", "dtype", "measured"),
    [(1000, torch.float32, 1000), (1002, torch.float32, 1000), (1, torch.float32, 4), (7, torch.bfloat16, 6)],
)
def test_sizes_are_whole_numbers_of_elements(alone: Place, size: int, dtype: torch.dtype, measured: int) -> None:
    found = measure(AllReduce(), alone, size, Procedure(dtype, 1, 0))
    assert (found.size, found.checked, found.wrong) == (measured, measured // dtype.itemsize, 0)


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "send-receive"])
def test_what_the_backend_refuses(alone: Place, name: str) -> None:
    """gloo has no float8; nothing here knows that."""
    with pytest.raises(Unavailable, match="Invalid scalar type"):
        measure(COLLECTIVES[name], alone, 64, Procedure(torch.float8_e4m3fn, 1, 0))


def test_another_error_is_no_refusal(alone: Place) -> None:
    class Broken(AllReduce):
        def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
            raise RuntimeError("Connection closed by peer [10.0.0.5]:51234")

    with pytest.raises(RuntimeError, match="Connection closed by peer") as caught:
        measure(Broken(), alone, 64, FAST)
    assert not isinstance(caught.value, Unavailable)


@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_bus_factors(world_size: int) -> None:
    """nccl-tests, doc/PERFORMANCE.md."""
    share = (world_size - 1) / world_size
    assert {name: each.bus_factor(world_size) for name, each in COLLECTIVES.items()} == {
        "all-reduce": 2 * share,
        "all-gather": share,
        "reduce-scatter": share,
        "broadcast": 1,
        "all-to-all": share,
        "send-receive": 1,
    }


def test_the_clock_does_not_count_waiting_for_the_start(alone: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    meet = Place.meet
    monkeypatch.setattr(Place, "meet", lambda place: (time.sleep(0.05), meet(place)))
    assert statistics.median([measure(AllReduce(), alone, 64, FAST).median_s for _ in range(3)]) < 0.04
