"""Random images made on the device, to measure the speed of training without any loading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from typing_extensions import override

from azureml_strategy.data.sampler import replica, require


class RepeatedBatch:
    """An epoch that returns the same batch again and again.

    Args:
        images: uint8 `(N, 3, H, W)`.
        labels: int64 `(N,)`.
        steps: length of an epoch.
    """

    def __init__(self, images: Tensor, labels: Tensor, steps: int) -> None:
        self.batch_size = len(labels)  # the learning rate is scaled by it
        self._batch = (images, labels)
        self._steps = steps
        self._given = self._skip = 0

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._given, self._skip = self._skip, 0
        while self._given < self._steps:
            self._given += 1
            yield self._batch

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch, for Lightning's checkpoint."""
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the next epoch at the position of `state`, or at its beginning if `state` is of an epoch's end."""
        self._skip = state["given"] % self._steps


class SyntheticDataModule(LightningDataModule):
    """One batch of random images and labels on each replica, made on its device and used at every step.

    Args:
        batch_size: images per step and process.
        image_size: width and height, pixels.
        num_classes: labels are from 0 to `num_classes - 1`.
        steps_per_epoch: batches of a training epoch.
        validation_steps: batches of a validation.
        seed: of the batch; each replica's batch is different.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        batch_size: int = 32,
        image_size: int = 224,
        num_classes: int = 1000,
        steps_per_epoch: int = 100,
        validation_steps: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require("batch_size", batch_size, batch_size >= 1, "1 or more: images a step and process")
        require("image_size", image_size, image_size >= 1, "1 pixel or more")
        require("num_classes", num_classes, num_classes >= 1, "1 or more")
        require("steps_per_epoch", steps_per_epoch, steps_per_epoch >= 1, "1 or more")
        require("validation_steps", validation_steps, validation_steps >= 1, "1 or more")
        self.batch_size = batch_size
        self.image_size = image_size
        self.num_classes = num_classes
        self.steps_per_epoch = steps_per_epoch
        self.validation_steps = validation_steps
        self.seed = seed

    @override
    def train_dataloader(self) -> RepeatedBatch:
        return RepeatedBatch(*self._batch(), self.steps_per_epoch)

    @override
    def val_dataloader(self) -> RepeatedBatch:
        return RepeatedBatch(*self._batch(), self.validation_steps)

    def _batch(self) -> tuple[Tensor, Tensor]:
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        _, rank = replica(self.trainer)
        generator = torch.Generator(device).manual_seed(self.seed + rank)
        shape = (self.batch_size, 3, self.image_size, self.image_size)
        images = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
        labels = torch.randint(self.num_classes, (self.batch_size,), device=device, generator=generator)
        return images, labels
