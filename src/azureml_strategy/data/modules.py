"""The data module for class folders of images."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from azureml_strategy.data.folders import DataFolderError, resolve_root
from azureml_strategy.data.images import EvaluationImages, TrainingImages
from azureml_strategy.data.sampler import (
    EvaluationSampler,
    ResumableLoader,
    TrainingSampler,
    default_num_workers,
    global_seed,
    replica,
    require,
)

# Seconds that a worker may take for one batch. A mount that stopped answering must end the run, not stall it forever.
_BATCH_TIMEOUT = 600

ImageLoader = DataLoader[tuple[Tensor, int]]


class ImageFolderDataModule(LightningDataModule):
    """Images in class folders, `root/train/class/image.jpg` and `root/val/class/image.jpg`, as ImageNet's.

    Batches are `(images, labels)`: uint8 `(batch_size, 3, image_size, image_size)`, to be normalised on the device, and
    int64 `(batch_size,)`. No metric may count a label of -100.

    Training images are shuffled by epoch and `seed_everything`'s seed. In an evaluation, exactly one replica reads each
    image, and all ranks take the same number of steps.

    Args:
        root: the folder with the folders for training and validation.
        input_name: instead of `root`, the name of an input of the Azure ML job, mounted or downloaded.
        image_size: width and height of the images returned, pixels.
        batch_size: images per step and process.
        num_workers: decoding processes per dataloader; None for this process's share of the cores.
        max_unreadable: how many images of a data set may be unreadable before a process gives up.
        minimum_scale: the smallest share of an image's area that a training crop may have.
        flip: mirror half of the training images.
        evaluation_centre: side of the evaluated centre square divided by the image's shorter side.
        train_folder: name of the folder for training.
        val_folder: name of the folder for validation, which is the test set as well.

    Raises:
        ValueError: an argument is out of range, or not exactly one of `root` and `input_name` is given.
        DataFolderError: the job has no input of that name; in `setup`, a folder is missing or empty, or the classes of
            the two folders differ.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        input_name: str | None = None,
        image_size: int = 224,
        batch_size: int = 32,
        num_workers: int | None = None,
        max_unreadable: int = 100,
        minimum_scale: float = 0.08,
        flip: bool = True,
        evaluation_centre: float = 0.875,
        train_folder: str = "train",
        val_folder: str = "val",
    ) -> None:
        super().__init__()
        require("image_size", image_size, image_size >= 1, "1 pixel or more")
        require("batch_size", batch_size, batch_size >= 1, "1 or more: images a step and process")
        require("num_workers", num_workers or 0, (num_workers or 0) >= 0, "0 or more, or None to choose")
        require("max_unreadable", max_unreadable, max_unreadable >= 0, "0 or more")
        require("minimum_scale", minimum_scale, 0 < minimum_scale <= 1, "above 0 and up to 1")
        require("evaluation_centre", evaluation_centre, 0 < evaluation_centre <= 1, "above 0 and up to 1")
        self.root = resolve_root(root, input_name, os.environ)
        self.image_size = image_size
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.max_unreadable = max_unreadable
        self.minimum_scale = minimum_scale
        self.flip = flip
        self.evaluation_centre = evaluation_centre
        self.train_folder = train_folder
        self.val_folder = val_folder
        self.num_classes: int | None = None
        self._train: TrainingImages | None = None
        self._val: EvaluationImages | None = None

    @override
    def setup(self, stage: str) -> None:
        """List the images that the stage needs, once."""
        if self._val is None:
            folder = self.root / self.val_folder
            self._val = EvaluationImages(folder, self.image_size, self.max_unreadable, self.evaluation_centre)
            self.num_classes = len(self._val.classes)
        if stage == "fit" and self._train is None:
            self._train = TrainingImages(
                self.root / self.train_folder,
                self.image_size,
                self.max_unreadable,
                self.minimum_scale,
                self.flip,
                global_seed(),
            )
            _check_same_classes(self._train, self._val)

    @override
    def train_dataloader(self) -> ImageLoader:
        """Return shuffled batches, all of the full size.

        Raises:
            ValueError: there are fewer images than one batch on each replica.
        """
        assert self._train is not None, "setup('fit') lists the images"
        replicas, rank = replica(self.trainer)
        if len(self._train) < self.batch_size * replicas:
            raise ValueError(
                f"{self._train.folders.root} has {len(self._train)} images, fewer than one global batch: "
                f"batch_size={self.batch_size} on each of {replicas} replicas. An epoch would have no step. Set "
                f"data.batch_size={len(self._train) // replicas} or less, or use fewer processes."
            )
        sampler = TrainingSampler(self._train, replicas, rank, global_seed())
        return ResumableLoader(self._train, sampler=sampler, **self._reading())

    @override
    def val_dataloader(self) -> ImageLoader:
        """Return every validation image once, in order."""
        assert self._val is not None, "setup() lists the images"
        sampler = EvaluationSampler(self._val, *replica(self.trainer))
        return DataLoader(self._val, sampler=sampler, **self._reading())

    @override
    def test_dataloader(self) -> ImageLoader:
        """Return the same as for validation: ImageNet's test set has no labels."""
        return self.val_dataloader()

    def _reading(self) -> dict[str, Any]:
        trainer = self.trainer
        workers = self.num_workers
        if workers is None:
            workers = default_num_workers(trainer.num_devices if trainer is not None else 1)
        on_gpu = trainer.strategy.root_device.type == "cuda" if trainer is not None else torch.cuda.is_available()
        return {
            "batch_size": self.batch_size,
            "num_workers": workers,
            "pin_memory": on_gpu,
            "persistent_workers": workers > 0,
            "timeout": _BATCH_TIMEOUT if workers > 0 else 0,
        }


def _check_same_classes(train: TrainingImages, val: EvaluationImages) -> None:
    """Refuse folders with different classes: a label is the index of a class, so it would mean two things."""
    if train.classes == val.classes:
        return
    only_one = sorted(set(train.classes) ^ set(val.classes))
    raise DataFolderError(
        f"{train.folders.root} has {len(train.classes)} class folders and {val.folders.root} has "
        f"{len(val.classes)}; only in one of them: {', '.join(only_one[:5])}. A label is the place of its class "
        "among the sorted names, so both need the same folders: add the missing ones, empty if there are no images."
    )
