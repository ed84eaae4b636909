"""The rounds of pairs; what three nodes measure is in tests/multiprocess."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.collectives.pairs import tournament


@given(st.integers(2, 65))
def test_every_two_nodes_meet_once_and_no_node_is_in_two_pairs(nodes: int) -> None:
    rounds = tournament(nodes)
    played = [pair for pairs in rounds for pair in pairs]
    assert sorted(played) == list(itertools.combinations(range(nodes), 2))
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    assert len(rounds) == nodes - 1 + nodes % 2, "no round could be saved"
