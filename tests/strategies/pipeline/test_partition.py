from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from tests.strategies.pipeline.modules import Layer, Three
from torch import nn

from azureml_strategy.strategies.pipeline import PipelineError, PipelineReady
from azureml_strategy.strategies.pipeline.partition import chain_of, check_method, place_of, stage_bounds

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


def test_layers_are_found_by_name_and_functions_nowhere() -> None:
    module = Three()
    assert isinstance(module, PipelineReady)
    layers = chain_of(module)
    places = [place_of(module, index, layer) for index, layer in enumerate(layers)]
    assert places == ["network.first", None, "network.last"]


def test_a_list_called_layers_needs_no_names() -> None:
    module = LightningModule()
    module.layers = nn.ModuleList([nn.Linear(1, 1)])
    assert place_of(module, 0, Layer(nn.Identity, "embedding")) == "layers.0"
    assert place_of(module, 1, Layer(nn.Identity, "output")) is None


def test_a_module_without_the_protocol() -> None:
    with pytest.raises(PipelineError, match=r"LightningModule cannot be cut.*pipeline_layers\(\).*azureml_ddp"):
        chain_of(LightningModule())


def test_two_layers_of_one_name() -> None:
    module = Three()
    module.pipeline_layers = lambda: [Layer(nn.Identity, "same"), Layer(nn.Identity, "same")]
    with pytest.raises(PipelineError, match="several layers called same"):
        chain_of(module)
