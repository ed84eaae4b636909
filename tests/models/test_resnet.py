"""ResNet-50 against what is published of torchvision's, and against transformers' implementation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from azureml_strategy.models import Bottleneck, ResNet50


@pytest.fixture(scope="module")
def network() -> ResNet50:
    torch.manual_seed(0)
    return ResNet50().eval()


def test_the_number_of_parameters_is_the_published_one(network: ResNet50) -> None:
    assert sum(parameter.numel() for parameter in network.parameters()) == 25_557_032


def test_names_and_order_are_torchvisions(network: ResNet50) -> None:
    names = list(network.state_dict())
    assert len(names) == 320
    assert names[:7] == [
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
        "bn1.running_mean",
        "bn1.running_var",
        "bn1.num_batches_tracked",
        "layer1.0.conv1.weight",
    ]
    parameters = [name for name, _ in network.named_parameters()]
    assert parameters[9:18] == [
        "layer1.0.conv3.weight",
        "layer1.0.bn3.weight",
        "layer1.0.bn3.bias",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.weight",
        "layer1.0.downsample.1.bias",
        "layer1.1.conv1.weight",
        "layer1.1.bn1.weight",
        "layer1.1.bn1.bias",
    ]
    assert names[-4:] == ["layer4.2.bn3.running_var", "layer4.2.bn3.num_batches_tracked", "fc.weight", "fc.bias"]


def test_shapes_are_torchvisions(network: ResNet50) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer2.0.conv2.weight"] == (128, 128, 3, 3)
    assert shapes["layer3.5.conv3.weight"] == (1024, 256, 1, 1)
    assert shapes["layer4.0.downsample.0.weight"] == (2048, 1024, 1, 1)
    assert shapes["fc.weight"] == (1000, 2048)


def _in_the_order_of_transformers(network: ResNet50) -> Iterator[Tensor]:
    """Its tensors in the order in which transformers lists them: the shortcut before the convolutions."""
    for module in (network.conv1, network.bn1):
        yield from module.state_dict().values()
    for block in network.modules():
        if isinstance(block, Bottleneck):
            tensors = block.state_dict()
            yield from (tensor for name, tensor in tensors.items() if name.startswith("downsample"))
            yield from (tensor for name, tensor in tensors.items() if not name.startswith("downsample"))
    yield from network.fc.state_dict().values()


def test_forward_is_that_of_transformers_with_the_same_weights(network: ResNet50) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_labels=1000, layer_type="bottleneck", downsample_in_bottleneck=False)
    oracle = ResNetForImageClassification(config).eval()
    with torch.no_grad():
        for name, tensor in network.named_buffers():  # statistics at their start would hide a wrong order
            if "running" in name:
                tensor.uniform_(0.5, 1.5)
        ours = list(_in_the_order_of_transformers(network))
        theirs = list(oracle.state_dict().values())
        assert len(ours) == len(theirs)
        for source, target in zip(ours, theirs, strict=True):
            assert source.shape == target.shape
            target.copy_(source)
        images = torch.randn(2, 3, 96, 64)
        expected = oracle(images).logits
        assert expected.std() > 0.01
        torch.testing.assert_close(network(images), expected, atol=1e-5, rtol=1e-5)


def test_the_stride_is_on_the_3x3() -> None:
    block = Bottleneck(256, 128, stride=2)
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))
    assert block(torch.randn(1, 256, 7, 7)).shape == (1, 512, 4, 4)


def test_convolutions_start_as_he_et_al() -> None:
    torch.manual_seed(0)
    block = Bottleneck(256, 128, stride=1)
    network = ResNet50(num_classes=2)
    weight = network.layer4[0].conv2.weight
    expected = (2 / (512 * 9)) ** 0.5  # fan-out: output channels times kernel
    assert weight.std().item() == pytest.approx(expected, rel=0.01)
    assert block.bn3.weight.eq(1).all()


def test_zero_init_makes_each_bottleneck_its_shortcut() -> None:
    network = ResNet50(num_classes=2, zero_init_residual=True).eval()
    blocks = [module for module in network.modules() if isinstance(module, Bottleneck)]
    assert len(blocks) == 16
    features = torch.rand(1, 256, 4, 4)
    torch.testing.assert_close(network.layer1[1](features), features)
    gammas = [m.weight for m in network.modules() if isinstance(m, nn.BatchNorm2d) and not m.weight.any()]
    assert len(gammas) == 16  # the last of each bottleneck, and no other


def test_channels_last_computes_the_same(network: ResNet50) -> None:
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = network(images)
        other = ResNet50().eval()
        other.load_state_dict(network.state_dict())
        actual = other.to(memory_format=torch.channels_last)(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
