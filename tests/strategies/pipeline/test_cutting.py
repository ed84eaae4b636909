"""A module cut down to one of its stages."""

from __future__ import annotations

import pytest
import torch
from tests.strategies.pipeline.modules import Layer, Three
from torch import nn

from azureml_strategy.strategies.pipeline import PipelineError
from azureml_strategy.strategies.pipeline.chain import OwnChain
from azureml_strategy.strategies.pipeline.cutting import Cut, OtherStage
from azureml_strategy.strategies.pipeline.refusals import refuse_stages_of_copies


def cut_module(module: Three, num_stages: int, partition: str) -> Cut:
    return Cut(module, OwnChain(module), num_stages, partition)


def build(cut: Cut, *indices: int) -> dict[int, nn.Module]:
    layers = cut.stage_layers()
    return {index: layers[index].build() for index in indices}


def test_a_stage_has_its_layers_and_placeholders_for_the_others() -> None:
    module = Three(sketched=True)
    cut = cut_module(module, 2, "uniform")
    assert (cut.bounds, cut.parameters) == ([0, 2, 3], [20, 0, 20])
    cut.drop_others(0)
    build(cut, 0, 1)
    cut.keep_built()
    assert torch.equal(module.network["first"].weight, Three.linear(0).weight)
    assert isinstance(module.network["last"], OtherStage)
    assert [name for name, _ in module.named_parameters()] == ["network.first.weight", "network.first.bias"]
    with pytest.raises(PipelineError, match=r"network\.last is on another stage"):
        module(torch.zeros(1, 4))


def test_layers_that_are_there_are_kept() -> None:
    module = Three()
    first = module.network["first"]
    with torch.no_grad():
        first.weight.fill_(7.0)
    cut = cut_module(module, 2, "uniform")
    assert build(cut, 0)[0] is first


def test_a_module_cut_before_is_cut_alike_again_and_not_otherwise() -> None:
    module = Three()
    cut = cut_module(module, 2, "uniform")
    cut.drop_others(0)
    build(cut, 0, 1)
    cut.keep_built()
    again = cut_module(module, 2, "uniform")
    assert (again.bounds, again.parameters) == (cut.bounds, cut.parameters)
    assert build(again, 0)[0] is module.network["first"]
    with pytest.raises(PipelineError, match="cut before, into other stages"):
        build(cut_module(module, 1, "uniform"), 2)


def test_a_tie_within_a_stage_is_one_parameter_and_between_stages_deepspeeds() -> None:
    whole = cut_module(Three(sketched=True, tied=True), 1, "uniform")
    assert [layer.tied for layer in whole.stage_layers()] == [None, None, None]
    layers = build(whole, 0, 2)
    assert layers[0].weight is layers[2].weight
    assert layers[0].bias is not layers[2].bias
    halves = cut_module(Three(sketched=True, tied=True), 2, "uniform")
    assert [layer.tied for layer in halves.stage_layers()] == ["matrix", None, "matrix"]


def test_parameters_outside_the_chain() -> None:
    module = Three()
    module.extra = nn.Linear(1, 1, bias=False)
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    with pytest.raises(PipelineError, match=r"Three has extra\.weight, kept outside of its pipeline_layers\(\)"):
        cut_module(module, 2, "uniform")


def test_a_layer_that_the_module_does_not_hold() -> None:
    module = Three()
    module.network = nn.ModuleDict()
    module.pipeline_layers = lambda: [Layer(lambda: Three.linear(0), "nowhere")]
    with pytest.raises(PipelineError, match="'nowhere' has parameters, but Three holds no submodule"):
        cut_module(module, 1, "uniform")


def test_the_summary_names_layers_and_parameters() -> None:
    summary = cut_module(Three(), 2, "uniform").summary(replicas=4)
    assert summary == "Pipeline of 2 stages x 4 replicas; parameters by stage: layers 0 to 1: 20; layers 2 to 2: 20"


def test_a_stage_with_nothing_but_a_copy_is_refused_in_bfloat16() -> None:
    module = Three(tied=True)
    assert cut_module(module, 2, "uniform").stages_of_copies() == [], "the bias is its own"
    for layer in module.network.values():
        layer.register_parameter("bias", None)
    stages = cut_module(module, 2, "uniform").stages_of_copies()
    assert stages == [1]
    assert cut_module(module, 1, "uniform").stages_of_copies() == []
    refuse_stages_of_copies(stages, "32-true")
    with pytest.raises(PipelineError, match=r"Stage 1 has no parameter of its own.*such as a bias"):
        refuse_stages_of_copies(stages, "bf16-mixed")
