from __future__ import annotations

import itertools
import random
from collections.abc import Set

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.bench.measure import Diagnosis, diagnose, tournament


@given(st.integers(2, 65))
def test_every_two_nodes_meet_once_and_no_node_is_in_two_pairs(nodes: int) -> None:
    rounds = tournament(nodes)
    played = [pair for pairs in rounds for pair in pairs]
    assert sorted(played) == list(itertools.combinations(range(nodes), 2))
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    assert len(rounds) == nodes - 1 + nodes % 2, "no round could be saved"


Pair = tuple[int, int]


def cluster(nodes: int, slow_nodes: Set[int] = frozenset(), slow_links: Set[Pair] = frozenset()) -> dict[Pair, float]:
    """Pairs of about 100 GB/s, of which a slow one has at most two thirds."""
    chance = random.Random(0)
    return {
        pair: chance.uniform(95, 105) * (0.6 if set(pair) & slow_nodes or pair in slow_links else 1)
        for pair in itertools.combinations(range(nodes), 2)
    }


@pytest.mark.parametrize("nodes", range(3, 9))
def test_healthy(nodes: int) -> None:
    found = diagnose(cluster(nodes))
    assert found.healthy
    assert found.usual == pytest.approx(100, abs=5)
    assert found.threshold == pytest.approx(0.8 * found.usual)


@given(st.data())
def test_up_to_half_of_the_nodes(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(3, 12))
    slow = data.draw(st.sets(st.integers(0, nodes - 1), max_size=nodes // 2))
    found = diagnose(cluster(nodes, slow))
    assert set(found.slow_nodes) == slow
    assert found.slow_links == ()
    assert found.healthy == (not slow)


@pytest.mark.parametrize("nodes", range(3, 9))
def test_one_link(nodes: int) -> None:
    assert diagnose(cluster(nodes, slow_links={(0, 2)})) == Diagnosis(
        pytest.approx(100, abs=5), pytest.approx(80, abs=4), (), ((0, 2),)
    )


def test_a_node_and_a_link_apart() -> None:
    found = diagnose(cluster(6, {5}, {(0, 1), (2, 5)}))
    assert (found.slow_nodes, found.slow_links) == ((5,), ((0, 1),)), "the node explains 2 - 5"


def test_two_slow_links_of_three_are_the_node_that_they_share() -> None:
    assert diagnose(cluster(3, slow_links={(0, 2), (1, 2)})).slow_nodes == (2,)


@pytest.mark.parametrize(
    ("bandwidth", "expected", "links"),
    [(50, None, ()), (50, 60, ()), (50, 100, ((0, 1),)), (79, 100, ((0, 1),)), (80, 100, ())],
)
def test_two_nodes_have_but_the_expected_value(bandwidth: float, expected: float | None, links: tuple[Pair]) -> None:
    found = diagnose({(0, 1): bandwidth}, expected)
    assert found.slow_nodes == (), "which of the two, nobody can tell"
    assert found.slow_links == links
    assert found.usual == expected


def test_more_nodes_are_compared_with_one_another() -> None:
    """A wrong expectation must not make every node a slow one."""
    assert diagnose(cluster(4), expected=1000).healthy
