"""What a module must say about itself."""

from __future__ import annotations

import pytest
from lightning.pytorch import LightningModule
from tests.strategies.pipeline.modules import Layer, Three
from torch import nn

from azureml_strategy.strategies.pipeline import PipelineError, PipelineReady
from azureml_strategy.strategies.pipeline.protocol import chain_of, place_of


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
