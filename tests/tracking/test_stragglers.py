from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest

from azureml_strategy.tracking.timing.rank_times import History
from azureml_strategy.tracking.timing.stragglers import (
    Cause,
    RankWindow,
    Straggler,
    StragglerDetector,
    delays,
    describe,
    hint,
)

_NOISE = random.Random()
USUAL = RankWindow(step=9, compute_s=0.080, data_wait_s=0.001, callbacks_s=0.001, communication_s=0.018, link_s=0.02)


@pytest.fixture(autouse=True)
def _the_same_noise() -> None:
    """In each run: of 300 draws one is too wide for the tolerance, which is no fault of what is tested."""
    _NOISE.seed(0)


def ranks(number: int, rank: int = -1, **slower: float) -> list[RankWindow]:
    """Ranks that differ by one per cent at random, one of them slower."""
    windows = []
    for each in range(number):
        noise = _NOISE.gauss(1, 0.01)
        window = replace(USUAL, compute_s=0.080 * noise, link_s=0.020 * noise)
        windows.append(replace(window, **slower) if each == rank else window)
    return windows


def compare(windows: list[RankWindow]) -> Iterator[Straggler]:
    return (each for each in delays(windows) if each.counts)


@pytest.mark.parametrize("number", [2, 4, 512])
@pytest.mark.parametrize(
    ("cause", "slower"),
    [
        ("compute", {"compute_s": 0.080 * 1.3}),
        ("data", {"data_wait_s": 0.030}),
        ("callbacks", {"callbacks_s": 0.030}),
        ("link", {"link_s": 0.045}),
    ],
)
def test_a_rank_is_named_with_its_cause_after_several_windows(
    number: int, cause: Cause, slower: dict[str, float]
) -> None:
    slow = StragglerDetector()
    named = [slow.add(ranks(number, number - 1, **slower)) for _ in range(12)]
    assert [bool(each) for each in named] == [False, False, True] + [False] * 9
    assert [(each.rank, each.cause) for each in named[2]] == [(number - 1, cause)]
    assert named[2][0].excess == pytest.approx(0.3, abs=0.06)
    assert slow.slow == {(number - 1, cause)}


def test_ten_per_cent_are_seen_but_not_named() -> None:
    slow = StragglerDetector()
    assert not any(slow.add(ranks(4, 2, compute_s=0.080 * 1.1)) for _ in range(40))
    assert [(each.rank, each.cause) for each in slow.lasting()] == [(2, "compute")]
    assert slow.lasting()[0].excess == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("number", [2, 4, pytest.param(512, marks=pytest.mark.exhaustive)])
def test_equal_ranks_are_not_named_nor_seen(number: int) -> None:
    for _ in range(5):
        slow = StragglerDetector()
        assert not any(slow.add(ranks(number)) for _ in range(30))
        assert slow.lasting() == []


def test_one_slow_window_is_no_slow_rank() -> None:
    slow = StragglerDetector()
    assert not any(slow.add(ranks(4, 1, **({"compute_s": 0.3} if window % 4 == 0 else {}))) for window in range(40))
    assert slow.lasting() == []


def test_a_rank_that_recovers_is_named_again_when_it_is_slow_again() -> None:
    slow = StragglerDetector()
    times = [0.12] * 5 + [0.08] * 5 + [0.12] * 5
    named = [len(slow.add(ranks(4, 1, compute_s=each))) for each in times]
    assert sum(named[:5]) == 1
    assert sum(named[5:10]) == 0
    assert sum(named[10:]) == 1


def test_those_who_wait_are_not_the_slow_ones() -> None:
    """Waiting ranks have a longer communication, and nothing else."""
    slow = StragglerDetector()
    waiting = replace(USUAL, communication_s=0.9)
    assert not any(slow.add([USUAL, waiting, waiting, waiting]) for _ in range(10))


def test_stages_of_a_pipeline_are_compared_with_their_like() -> None:
    first, last = replace(USUAL, group=0), replace(USUAL, group=1, compute_s=0.2)
    assert list(compare([first, last])) == []  # one of each
    assert list(compare([first, last, first, last])) == []
    found = list(compare([first, last, first, replace(last, compute_s=0.3)]))
    assert [(each.rank, each.cause) for each in found] == [(3, "compute")]


def test_links_are_compared_once_they_are_known_on_all_ranks() -> None:
    slow = StragglerDetector()
    for known in [False] * 10 + [True] * 10:
        found = ranks(2, 1, link_s=0.030)
        slow.add(found if known else [found[0], replace(found[1], link_s=None)])
    assert [(each.rank, each.cause) for each in slow.lasting()] == [(1, "link")]


def test_delays_too_short_to_matter_are_left_out() -> None:
    tiny = replace(USUAL, compute_s=0.001, communication_s=0.0, link_s=0.0)
    assert list(compare([tiny, replace(tiny, compute_s=0.002)])) == []


def test_a_sentence_names_place_and_share() -> None:
    found = next(compare([USUAL, replace(USUAL, compute_s=0.12)]))
    assert describe(found, "node-1, node 1, cuda:0") == (
        "rank 1 (node-1, node 1, cuda:0) holds up the others by 49% with computing"
    )


def test_the_history_keeps_the_extremes_in_a_bounded_number_of_windows() -> None:
    history = History()
    for step in range(10_000):
        slower = {"compute_s": 5.0} if step == 7777 else {}
        history.add([replace(each, step=step) for each in ranks(2, 1, **slower)], {(1, "compute")} if slower else set())
    assert len(history.windows) <= 500
    assert max(row["compute_s"][1] for row in history.windows) == 5.0
    assert [row["slow"] for row in history.windows if row["slow"]] == [{"1": "compute"}]
    steps = [row["step"] for row in history.windows]
    assert steps == sorted(set(steps))
    assert steps[-1] == 9999


def loaded(generator: random.Random, number: int) -> list[RankWindow]:
    """Ranks on a machine that something else loads: each window's times are half as long again, or not."""
    return [
        replace(USUAL, compute_s=0.080 * generator.lognormvariate(0, 0.15), link_s=0.020 * generator.expovariate(1))
        for _ in range(number)
    ]


@pytest.mark.parametrize(("number", "most"), [(2, 10), (4, 20), (16, 70)])
def test_ranks_of_a_loaded_machine_are_neither_named_nor_seen(number: int, most: int) -> None:
    """In 1,200 windows. By the share of the step alone, ten times as many would be named."""
    named = seen = 0
    for seed in range(40):
        generator, slow = random.Random(seed), StragglerDetector()
        named += sum(len(slow.add(loaded(generator, number))) for _ in range(30))
        seen += len(slow.lasting())
    assert named <= most
    assert seen == 0


@pytest.mark.parametrize("windows", range(1, 6))
def test_a_few_windows_are_not_a_whole_run(windows: int) -> None:
    slow = StragglerDetector()
    for _ in range(windows):
        slow.add(ranks(2, 1, compute_s=0.080 * 1.1))
    assert slow.lasting() == []


@pytest.mark.parametrize("cause", get_args(Cause))
def test_on_one_machine_no_node_is_to_be_replaced(cause: Cause) -> None:
    assert "replace the node" not in hint(cause, one_machine=True)
    assert ("replace" in hint(cause)) == (cause in ("compute", "link"))
