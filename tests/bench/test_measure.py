"""Sizes, times and bandwidths of one collective; what three ranks measure is in tests/multiprocess."""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from azureml_strategy.bench.collectives import COLLECTIVES, AllReduce, Broadcast, Place
from azureml_strategy.bench.measure import Procedure, Unavailable, measure

FAST = Procedure(torch.float32, iterations=3, warmup=1)


class Clock:
    """The clock that `measure` reads, which goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    module = importlib.import_module(measure.__module__)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: found.now))
    return found


class Counted(Broadcast):
    """Takes known times, and keeps what it is run on."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        self.clock = clock
        self.times = itertools.chain([0], seconds)  # the check comes first
        self.sums: list[float] = []

    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        self.sums.append(float(sent.abs().sum()))
        self.clock.now += next(self.times)


def test_warm_up_is_left_out_and_the_middle_counts(alone: Place, clock: Clock) -> None:
    collective = Counted(clock, 200, 150, 40, 10, 20)
    found = measure(collective, alone, 4000, Procedure(torch.float32, iterations=3, warmup=2))
    assert (found.min_s, found.median_s, found.max_s) == (10, 20, 40)
    assert found.p95_s == pytest.approx(38)
    assert found.algorithm_bandwidth == pytest.approx(4000 / found.median_s / 1e9)
    assert collective.sums[0] > 0, "checked with data"
    assert collective.sums[1:] == [0] * 5, "timed with zeros, which no sum can make infinite"


def test_percentile_of_many_and_of_one(alone: Place, clock: Clock) -> None:
    one = measure(Counted(clock, 5), alone, 4, Procedure(torch.float32, iterations=1, warmup=0))
    assert one.median_s == one.p95_s == one.min_s == one.max_s
    many = measure(Counted(clock, *range(1, 22)), alone, 4, Procedure(torch.float32, iterations=21, warmup=0))
    assert (many.median_s, many.p95_s, many.max_s) == (11, 20, 21)


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


def test_the_clock_does_not_count_waiting_for_the_start(
    alone: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet = Place.barrier

    def waits(place: Place) -> None:
        clock.now += 50
        meet(place)

    monkeypatch.setattr(Place, "barrier", waits)
    assert measure(Counted(clock, 9, 1, 2, 3), alone, 64, FAST).median_s == 2
