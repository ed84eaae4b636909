"""One window of ResNet-50's training with our recipe, with stock Lightning and in a hand-written loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor, nn
from torch.nn import functional

import azureml_strategy  # noqa: F401 - registers the name of the strategy
from azureml_strategy.data import SyntheticDataModule
from azureml_strategy.data.synthetic import RepeatedBatch
from azureml_strategy.models import Bottleneck, ImageClassifier, ResNet50, warmup_cosine
from azureml_strategy.models.classifier import IMAGENET_MEAN, IMAGENET_STD
from azureml_strategy.models.optimizer import decay_groups
from azureml_strategy.tracking import JobMLFlowLogger, ThroughputCallback

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLASSES = 1000


@dataclass(frozen=True)
class Plan:
    """What a window is.

    Attributes:
        batch_size: images a step.
        pixels: width and height of an image.
        warmup: steps at its start that do not count.
        steps: steps that do.
        network: one of `NETWORKS`.
    """

    batch_size: int = 256
    pixels: int = 224
    warmup: int = 10
    steps: int = 30
    network: str = "resnet50"


class SmallResNet(nn.Module):
    """Compiles in seconds on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Bottleneck(3, 4, 2)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.block(images).mean(dim=(2, 3)))


NETWORKS = {"resnet50": partial(ResNet50, CLASSES, zero_init_residual=True), "small": SmallResNet}


def make_model(plan: Plan, compiled: bool) -> ImageClassifier:
    """The recipe's model; its weights are the same each time."""
    torch.manual_seed(0)
    return ImageClassifier(NETWORKS[plan.network](), warmup_epochs=0, channels_last=True, compile=compiled)


class TimedBatches:
    """Passes batches on and notes when the device has done the warm-up, and when the steps after it."""

    def __init__(self, batches: RepeatedBatch, plan: Plan) -> None:
        self.batch_size = batches.batch_size
        self.moments: list[float] = []
        self._batches = batches
        self._ends = (plan.warmup, plan.warmup + plan.steps)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step, batch in enumerate(self._batches):
            if step in self._ends:
                synchronize()
                self.moments.append(time.perf_counter())
            yield batch


class TimedData(SyntheticDataModule):
    """The recipe's data module; one step more than timed, because the last moment comes with its batch."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.batch_size, plan.pixels, CLASSES, steps_per_epoch=plan.warmup + plan.steps + 1)
        self.plan = plan

    def train_dataloader(self) -> TimedBatches:
        self.timed = TimedBatches(super().train_dataloader(), self.plan)
        return self.timed


Train = Callable[[ImageClassifier, Plan], TimedBatches]


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def train_with_lightning(model: ImageClassifier, plan: Plan, **arguments: Any) -> TimedBatches:
    data = TimedData(plan)
    trainer = Trainer(
        max_epochs=1,
        accelerator="gpu" if DEVICE.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        benchmark=True,
        log_every_n_steps=10,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(model, datamodule=data)
    return data.timed


def train_stock(model: ImageClassifier, plan: Plan) -> TimedBatches:
    """Lightning's DDP, which is what `azureml_ddp` is on one GPU, without a logger and callbacks."""
    return train_with_lightning(model, plan, strategy="ddp", logger=False)


def train_recipe(model: ImageClassifier, plan: Plan, store: str | None) -> TimedBatches:
    """What resnet50_synthetic.yaml composes; without a store, without its logger and what needs one."""
    callbacks: list[Callback] = [ThroughputCallback(plan.warmup, unit="images")]
    callbacks += [LearningRateMonitor(logging_interval="step")] if store else []
    logger = JobMLFlowLogger("resnet50_gpu", tracking_uri=store) if store else False
    return train_with_lightning(model, plan, strategy="azureml_ddp", callbacks=callbacks, logger=logger)


def train_by_hand(model: ImageClassifier, plan: Plan) -> TimedBatches:
    """What somebody would write without Lightning and without this package; of the model only its network."""
    network = model.network.to(DEVICE).train()
    sgd = torch.optim.SGD(decay_groups(network, 5e-5), lr=0.1, momentum=0.9, nesterov=True)
    batches = TimedBatches(device_batches(plan), plan)
    schedule = partial(warmup_cosine, warmup_steps=0, total_steps=len(batches))
    scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, schedule)
    std = 255 * torch.tensor(IMAGENET_STD, device=DEVICE).view(-1, 1, 1)
    mean = 255 * torch.tensor(IMAGENET_MEAN, device=DEVICE).view(-1, 1, 1)
    for images, labels in batches:
        images = images.contiguous(memory_format=torch.channels_last).float().sub_(mean).div_(std)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = functional.cross_entropy(network(images), labels, label_smoothing=0.1)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        scheduler.step()
    network.zero_grad()
    network.cpu()  # as Lightning leaves it
    return batches


def device_batches(plan: Plan) -> RepeatedBatch:
    shape = (plan.batch_size, 3, plan.pixels, plan.pixels)
    images = torch.randint(256, shape, dtype=torch.uint8, device=DEVICE)
    labels = torch.randint(CLASSES, shape[:1], device=DEVICE)
    return RepeatedBatch(images, labels, plan.warmup + plan.steps + 1)


def window(train: Train, model: ImageClassifier, plan: Plan) -> tuple[float, float]:
    """Images per second, and the most GPU memory allocated in GiB."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start, end = train(model, plan).moments
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
    return plan.steps * plan.batch_size / (end - start), peak
