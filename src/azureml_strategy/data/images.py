"""Data sets of images in class folders."""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from azureml_strategy.data.crops import Crop, centre_crop, random_crop
from azureml_strategy.data.decode import decode_image
from azureml_strategy.data.folders import scan_class_folders
from azureml_strategy.data.unreadable import UnreadableImages

# The label that torch's cross_entropy ignores.
IGNORED_LABEL = -100


class ImageFolder(Dataset[tuple[Tensor, int]], ABC):
    """Images in class folders, decoded when asked for.

    Args:
        root: the folder that holds the class folders: `root/class/image.jpg`.
        image_size: width and height of the images given, pixels.
        max_unreadable: how many images may be unreadable before it is an error; each process counts its own.

    Raises:
        DataFolderError: the folder is missing, or has no class folders or no images.
    """

    def __init__(self, root: str | os.PathLike[str], image_size: int, max_unreadable: int) -> None:
        self.folders = scan_class_folders(root)
        self.image_size = image_size
        self.unreadable = UnreadableImages(len(self), max_unreadable, self.folders.path)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; the place of a class is its label."""
        return self.folders.classes

    def __len__(self) -> int:
        return len(self.folders.names)

    @abstractmethod
    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """An image, uint8 `(3, image_size, image_size)`, and its label."""

    @abstractmethod
    def crop(self, width: int, height: int, draw: int) -> Crop:
        """The part to use of an image of so many pixels."""

    def read(self, index: int, draw: int) -> tuple[Tensor, int] | None:
        """The image and its label, or None, counted, where the image cannot be read.

        Raises:
            UnreadableImagesError: more than `max_unreadable` images cannot be read.
        """
        if index in self.unreadable:
            return None
        try:
            path = self.folders.path(index)
            image = decode_image(path, self.image_size, lambda width, height: self.crop(width, height, draw))
        except Exception as error:  # Pillow's decoders raise anything: OSError, SyntaxError, struct.error, ...
            self.unreadable.add(index, error)
            return None
        return image, int(self.folders.labels[index])


class TrainingImages(ImageFolder):
    """Randomly cropped and mirrored images; another one takes the place of an unreadable one.

    What is random depends on the seed and the draw alone: not on the number of workers or processes, nor on
    whether the run was interrupted. Ranks that share a replica therefore read the same.

    Args:
        root: the folder that holds the class folders: `root/class/image.jpg`.
        image_size: width and height of the images given, pixels.
        max_unreadable: how many images may be unreadable before it is an error.
        minimum_scale: the smallest share of an image's area that a crop may have.
        flip: mirror half of the images.
        seed: of crops, mirroring and substitutes.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        image_size: int = 224,
        max_unreadable: int = 100,
        minimum_scale: float = 0.08,
        flip: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(root, image_size, max_unreadable)
        self.minimum_scale = minimum_scale
        self.flip = flip
        self.seed = seed

    @override
    def __getitem__(self, draw: int) -> tuple[Tensor, int]:
        """An image and its label.

        Args:
            draw: `epoch * len(self) + index`, as `TrainingSampler` counts, so that an image is cropped
                differently in each epoch; an index alone is a draw of epoch 0.
        """
        sample = self.read(draw % len(self), draw)
        substitutes = random.Random(f"{self.seed}/{draw}/substitutes")
        while sample is None:  # ends: that no image can be read is an error
            sample = self.read(substitutes.randrange(len(self)), draw)
        return sample

    @override
    def crop(self, width: int, height: int, draw: int) -> Crop:
        rng = random.Random(f"{self.seed}/{draw}")
        return random_crop(width, height, self.minimum_scale, self.flip, rng)


class EvaluationImages(ImageFolder):
    """The centres of the images; a blank one with the label -100 takes the place of an unreadable one.

    Args:
        root: the folder that holds the class folders: `root/class/image.jpg`.
        image_size: width and height of the images given, pixels.
        max_unreadable: how many images may be unreadable before it is an error.
        centre: side of the square that is used over the image's shorter side.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        image_size: int = 224,
        max_unreadable: int = 100,
        centre: float = 0.875,
    ) -> None:
        super().__init__(root, image_size, max_unreadable)
        self.centre = centre

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """An image and its label; a blank one for `index == len(self)`, with which samplers pad."""
        sample = self.read(index, draw=index) if index < len(self) else None
        return sample or (torch.zeros(3, self.image_size, self.image_size, dtype=torch.uint8), IGNORED_LABEL)

    @override
    def crop(self, width: int, height: int, draw: int) -> Crop:
        return centre_crop(width, height, self.centre)
