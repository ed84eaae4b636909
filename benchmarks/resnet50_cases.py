"""ResNet-50 by hand, with stock Lightning and with our recipe: one network, one batch, one optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from fits import Case, fit, graphs_uncut, recipe, stock
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor, nn
from torch.nn import functional
from turns import DEVICE, Turns

from azureml_strategy.models import Bottleneck, ImageClassifier, ResNet50, warmup_cosine
from azureml_strategy.models.classifier import IMAGENET_MEAN, IMAGENET_STD
from azureml_strategy.models.optimizer import decay_groups
from azureml_strategy.tracking import JobMLFlowLogger, ThroughputCallback

CLASSES = 1000

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """What is trained.

    Attributes:
        batch_size: images a step.
        pixels: width and height of an image.
        network: one of `NETWORKS`.
    """

    batch_size: int = 256
    pixels: int = 224
    network: str = "resnet50"


class SmallResNet(nn.Module):
    """Compiles in seconds on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Bottleneck(3, 4, 2), Bottleneck(16, 4, 1), Bottleneck(16, 4, 1))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.blocks(images).mean(dim=(2, 3)))


NETWORKS = {"resnet50": partial(ResNet50, CLASSES, zero_init_residual=True), "small": SmallResNet}


def make_model(size: Size, channels_last: bool = True, **settings: Any) -> ImageClassifier:
    """The recipe's model; its weights are the same each time."""
    torch.manual_seed(0)
    return ImageClassifier(NETWORKS[size.network](), warmup_epochs=0, channels_last=channels_last, **settings)


def make_batch(size: Size) -> Batch:
    """Random images and labels on the device."""
    shape = (size.batch_size, 3, size.pixels, size.pixels)
    images = torch.randint(256, shape, dtype=torch.uint8, device=DEVICE)
    return images, torch.randint(CLASSES, shape[:1], device=DEVICE)


class HandWritten:
    """What somebody would write without Lightning and without this package; of the model only its network.

    Args:
        model: whose network is trained.
        compiled: compile the network with its loss.
        total: steps of the training.
    """

    def __init__(self, model: ImageClassifier, compiled: bool, total: int) -> None:
        self.network = model.network.to(DEVICE).train()
        groups = decay_groups(self.network, 5e-5)
        self.sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, fused=True)
        schedule = partial(warmup_cosine, warmup_steps=0, total_steps=total)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.sgd, schedule)
        self.std = 255 * torch.tensor(IMAGENET_STD, device=DEVICE).view(-1, 1, 1)
        self.mean = 255 * torch.tensor(IMAGENET_MEAN, device=DEVICE).view(-1, 1, 1)
        self.loss_of = torch.compile(self._loss) if compiled else self._loss

    def step(self, batch: Batch) -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = self.loss_of(*batch)
        self.sgd.zero_grad()
        loss.backward()
        self.sgd.step()
        self.scheduler.step()

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last).float().sub_(self.mean).div_(self.std)
        return functional.cross_entropy(self.network(images), labels, label_smoothing=0.1)


EAGER = {"lightning": stock(compiled=False), "recipe": recipe()}
_WHOLE = recipe(compile="whole")
COMPILED = {
    "recipe": _WHOLE,
    "lightning": stock(compiled=True),
    # Each of these is the recipe but for one thing; the last one is stock Lightning but for one.
    "compile=blocks": recipe(compile="blocks"),
    "SGD not fused": replace(_WHOLE, model={"fused": False}),
    "CUDA graphs": recipe(compile="whole", compile_mode="reduce-overhead"),
    "not channels_last": replace(_WHOLE, model={"channels_last": False}),
    "lightning, graphs not cut": stock(compiled=True, within=graphs_uncut),
}


def train(case: Case, size: Size, store: str | None, turns: Turns) -> None:
    """One fit of a case. Of the recipe, without a store for MLflow its logger and what needs one are left out."""
    model = make_model(size, **case.model)
    arguments: dict[str, Any] = {"benchmark": True, "log_every_n_steps": 10}
    if case.is_ours:
        arguments["callbacks"] = [ThroughputCallback(unit="images")]
        if store:
            arguments["callbacks"].append(LearningRateMonitor(logging_interval="step"))
            arguments["logger"] = JobMLFlowLogger("resnet50_gpu", tracking_uri=store)
    elif case.compiled:
        model.network.compile()
    fit(case, model, turns, **arguments)
