"""Where a chain is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.strategies.pipeline import PipelineError
from azureml_strategy.strategies.pipeline.partition import check_method, stage_bounds

GPT = ["embedding", *["block"] * 6, "norm", "output"]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.data())
def test_every_layer_is_in_one_stage_and_every_stage_has_one(parameters: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(parameters)))
    partition = data.draw(st.sampled_from(["parameters", "uniform"]))
    bounds = stage_bounds(parameters, ["layer"] * len(parameters), stages, partition)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(parameters), stages + 1)
    assert all(start < stop for start, stop in pairwise(bounds))


def test_uniform_counts_layers_and_parameters_weighs_them() -> None:
    assert stage_bounds([1, 1, 1, 9], ["layer"] * 4, 2, "uniform") == [0, 2, 4]
    assert stage_bounds([1, 1, 1, 9], ["layer"] * 4, 2, "parameters") == [0, 3, 4]


def test_a_kind_is_spread_evenly() -> None:
    bounds = stage_bounds([5] * 9, GPT, 3, "type:block")
    assert [GPT[start:stop].count("block") for start, stop in pairwise(bounds)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("parameters", "stages", "partition", "words"),
    [
        ([1, 1], 3, "uniform", ("num_stages=3", "2 layers")),
        ([4, 0, 0, 4], 4, "uniform", ("no trainable parameter", "stage 1", "fewer stages than 4")),
        ([1, 1], 2, "type:block", ("type:block", "layer")),
    ],
)
def test_what_cannot_be_cut(parameters: list[int], stages: int, partition: str, words: tuple[str, ...]) -> None:
    with pytest.raises(PipelineError) as error:
        stage_bounds(parameters, ["layer"] * len(parameters), stages, partition)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("partition", ["best", "type:", ""])
def test_unknown_ways_of_cutting(partition: str) -> None:
    with pytest.raises(PipelineError, match="'uniform'"):
        check_method(partition)
