"""The classifier as a chain of layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from azureml_strategy.models import ImageClassifier, ResNet50


def test_the_layers_one_after_the_other_are_the_classifier() -> None:
    classifier = ImageClassifier(ResNet50(3)).eval()
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    outputs, targets = classifier.pipeline_batch((images, torch.tensor([0, 2])))
    for layer in classifier.pipeline_layers():
        outputs = layer.build()(outputs)
    assert torch.equal(outputs, classifier(images))
    assert targets.tolist() == [0, 2]


def test_the_names_are_those_of_the_submodules_and_cover_all_parameters() -> None:
    classifier = ImageClassifier(ResNet50(3))
    layers = classifier.pipeline_layers()
    assert all(layer.build() is classifier.get_submodule(layer.name) for layer in layers)
    inside = sum(parameter.numel() for layer in layers for parameter in layer.build().parameters())
    assert inside == sum(parameter.numel() for parameter in classifier.parameters())
    assert [layer.kind for layer in layers].count("bottleneck") == 16


def test_a_network_that_is_no_chain() -> None:
    with pytest.raises(TypeError, match=r"Sequential cannot be cut into stages: it has no chain\(\)"):
        ImageClassifier(nn.Sequential(nn.Flatten())).pipeline_layers()
