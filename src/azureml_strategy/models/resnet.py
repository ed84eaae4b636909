"""ResNet-50 v1.5, with torchvision's parameter names and order."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from typing_extensions import override

_EXPANSION = 4  # channels of a bottleneck's output divided by channels inside
_STEM_CHANNELS = 64


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, in parallel with a shortcut.

    In v1.5 the stride is on the 3x3 convolution, not on the first 1x1 as in the paper. This gives about half a point
    better top-1 (https://ngc.nvidia.com/catalog/resources/nvidia:resnet_50_v1_5_for_pytorch), and torchvision does the
    same.

    Args:
        in_channels: channels of the input.
        channels: channels inside; the output has four times as many.
        stride: of the 3x3 convolution, and of the shortcut.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = channels * _EXPANSION
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    @override
    def forward(self, features: Tensor) -> Tensor:
        """Map `(N, in_channels, H, W)` to `(N, 4 * channels, ceil(H / stride), ceil(W / stride))`."""
        shortcut = features if self.downsample is None else self.downsample(features)
        features = self.relu(self.bn1(self.conv1(features)))
        features = self.relu(self.bn2(self.conv2(features)))
        features = self.bn3(self.conv3(features))
        features += shortcut  # in place, which writes one activation less
        return cast(Tensor, self.relu(features))


class ResNet50(nn.Module):
    """ResNet-50 v1.5: 25,557,032 parameters for 1,000 classes, 4.09 GMAC for an image of 224 pixels.

    Names, order and initialisation of the parameters are those of `torchvision.models.resnet50`
    (https://github.com/pytorch/vision/blob/main/torchvision/models/resnet.py), so its checkpoints load.

    Args:
        num_classes: number of outputs.
        zero_init_residual: initialise the last batch normalisation of every bottleneck with zero, so that each begins
            as its shortcut. This is better at large batches (Goyal et al. 2017, section 5.1,
            https://arxiv.org/abs/1706.02677), by 0.2 to 0.3 points of top-1 according to torchvision.
    """

    def __init__(self, num_classes: int = 1000, zero_init_residual: bool = False) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = nn.Conv2d(3, _STEM_CHANNELS, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(_STEM_CHANNELS)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        # He et al. 2015 (https://arxiv.org/abs/1512.03385), table 1, column "50-layer"
        self.layer1 = _stage(_STEM_CHANNELS, 64, blocks=3, stride=1)
        self.layer2 = _stage(256, 128, blocks=4, stride=2)
        self.layer3 = _stage(512, 256, blocks=6, stride=2)
        self.layer4 = _stage(1024, 512, blocks=3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(2048, num_classes)
        # As torchvision does: He et al. 2015 (https://arxiv.org/abs/1502.01852) by fan-out.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck) and zero_init_residual:
                nn.init.zeros_(module.bn3.weight)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Map normalised images `(N, 3, H, W)` to logits `(N, num_classes)`; H and W are 32 pixels or more."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return cast(Tensor, self.fc(self.flatten(self.avgpool(features))))

    def chain(self) -> list[tuple[str, str]]:
        """Return name and kind of each layer, in execution order."""
        stages = {"layer1": self.layer1, "layer2": self.layer2, "layer3": self.layer3, "layer4": self.layer4}
        blocks = [f"{stage}.{block}" for stage, modules in stages.items() for block in range(len(modules))]
        return [
            *((name, "stem") for name in ("conv1", "bn1", "relu", "maxpool")),
            *((name, "bottleneck") for name in blocks),
            *((name, "head") for name in ("avgpool", "flatten", "fc")),
        ]


def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(in_channels, channels, stride)
    return nn.Sequential(first, *(Bottleneck(channels * _EXPANSION, channels, 1) for _ in range(blocks - 1)))
