"""Image data sets for training and evaluation: whole batches, decoded and cropped; unreadable images are counted."""

from __future__ import annotations

import os
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info
from typing_extensions import override

from azureml_strategy.data.decoding import Crop, centre_crop, choose_decoder, random_crop, window_crop
from azureml_strategy.data.folders import ClassFolders, scan_class_folders
from azureml_strategy.data.pillow_images import is_damage
from azureml_strategy.data.shard_index import RecordReader
from azureml_strategy.data.storage import own_fault, storage_error
from azureml_strategy.data.unreadable import UnreadableImages
from azureml_strategy.files import read_whole
from azureml_strategy.interfaces import IGNORED_LABEL

# So many records are in memory at a time before they are decoded. A batch may have hundreds of photographs of 5 MB.
_RECORDS_AT_ONCE = 64
# In place of the first draw of a data set: no draw yet, or draws that need no check.
_NOTHING_DRAWN, _NOT_WATCHED = -1, -2
_SAME_CROPS = (
    "Image {draw} was drawn a second time as a draw of epoch 0, and is cropped and mirrored as before: by plain "
    "indices, which DataLoader(images, shuffle=True) gives, all epochs are alike. Type: "
    "sampler = TrainingSampler(images, num_replicas=1, rank=0, seed=0); "
    "loader = ResumableLoader(images, sampler=sampler, batch_size=...); and before each epoch, as a Trainer does by "
    "itself, sampler.set_epoch(epoch)."
)


class RecordSource(RecordReader, Protocol):
    """Where a data set reads its records from: `FolderSource`, or `ShardedImages` for packed shards."""

    @property
    def root(self) -> str:
        """The folder or the address of the data set."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; the place of a class is its label."""

    @property
    def labels(self) -> NDArray[Any]:
        """The label of each record, integers."""

    def __len__(self) -> int: ...

    def name(self, number: int) -> str:
        """Say where a record lies, for a message."""


class FolderSource(RecordReader):
    """Image files in class folders as records. No file stays open, and the operating system keeps what it can.

    Args:
        root: the folder that holds the class folders: `root/class/image.jpg`.

    Raises:
        DataFolderError: the folder is missing, or has no class folders or no images.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.folders = scan_class_folders(root)
        self.root, self.classes, self.labels = self.folders.root, self.folders.classes, self.folders.labels

    def __len__(self) -> int:
        return len(self.folders.names)

    def name(self, number: int) -> str:
        """Return the path of a file."""
        return self.folders.path(number)

    @override
    def read(self, numbers: Sequence[int]) -> list[bytes | Exception]:
        return [self._read(number) for number in numbers]

    def _read(self, number: int) -> bytes | Exception:
        path = self.folders.path(number)
        try:
            return read_whole(path)
        except OSError as error:
            return error if own_fault(error, os.path.dirname(path)) else storage_error(path, error)


class ImageBatch(Sequence[tuple[Tensor, int]]):
    """A batch in one piece of memory, which is also a sequence of its samples.

    Attributes:
        images: uint8 `(N, 3, size, size)`, in channels_last.
        labels: int64 `(N,)`.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    @override
    def __len__(self) -> int:
        return len(self.labels)

    @override
    def __getitem__(self, place: Any) -> Any:
        return self.images[place], int(self.labels[place])


def collate_images(samples: Sequence[Any]) -> Any:
    """Return the images and labels of an `ImageBatch` as they are, and other samples as torch's `default_collate`."""
    return (samples.images, samples.labels) if isinstance(samples, ImageBatch) else default_collate(list(samples))


class ImageFolder(Dataset[tuple[Tensor, int]], ABC):
    """Images of a source of records, decoded on access.

    torch's DataLoader asks for a batch at a time, by `__getitems__`. With `collate_fn=collate_images`, the batch that
    was decoded is what arrives; torch's own collate function works as well, but copies the images once more.

    Args:
        root: the folder that holds the class folders, `root/class/image.jpg`, or a source of records.
        image_size: width and height of the images returned, pixels.
        max_unreadable: how many images may be unreadable before it is an error; each process counts its own.
        decoder: `simplejpeg`, `pillow`, or `auto`, simplejpeg if it is installed.

    Raises:
        DataFolderError: the folder is missing, or has no class folders or no images.
        ModuleNotFoundError: simplejpeg is asked for and not installed.
        ValueError: there is no such decoder.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | RecordSource,
        image_size: int,
        max_unreadable: int,
        decoder: str = "auto",
    ) -> None:
        self.decode = choose_decoder(decoder)
        self.source: RecordSource = FolderSource(root) if isinstance(root, (str, os.PathLike)) else root
        self.image_size = image_size
        self.unreadable = UnreadableImages(len(self), max_unreadable, self.source.name)

    @property
    def folders(self) -> ClassFolders:
        """The class folders, of a data set that has them.

        Raises:
            TypeError: it has another source of records.
        """
        if not isinstance(self.source, FolderSource):
            raise TypeError(f"These images come from {type(self.source).__name__}, which has no class folders.")
        return self.source.folders

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; the index of a class is its label."""
        return self.source.classes

    @property
    def digest(self) -> str | None:
        """Hash of a packed set's index, by which a resumed run notices another set; None for folders."""
        return getattr(self.source, "digest", None)

    def __len__(self) -> int:
        return len(self.source)

    @abstractmethod
    def candidates(self, draw: int) -> Iterator[int]:
        """Yield the indices of images for a draw. The first that can be read is its sample."""

    @abstractmethod
    def crop(self, width: int, height: int, draw: int) -> Crop:
        """Return the part of an image to use. Width and height are the image's, in pixels."""

    @override
    def __getitem__(self, draw: int) -> tuple[Tensor, int]:
        """Return an image, uint8 `(3, image_size, image_size)`, and its label."""
        sample: tuple[Tensor, int] = self.__getitems__([draw])[0]
        return sample

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        """Yield each image once. Without this, Python would call `__getitem__` for ever: it takes any draw."""
        return (self[number] for number in range(len(self)))

    def __getitems__(self, draws: Sequence[int]) -> ImageBatch:
        """Return a batch of images and labels. A sample without candidates is blank and has the label -100.

        Raises:
            UnreadableImagesError: more than `max_unreadable` images cannot be read, or none can.
            StorageError: the storage of the records cannot be reached, or refuses.
            MemoryError: the memory is full. No other image stands in for that either.
        """
        pixels = _allocate(len(draws), self.image_size)
        labels = torch.full((len(draws),), IGNORED_LABEL, dtype=torch.int64, device="cpu")
        batch = ImageBatch(pixels.permute(0, 3, 1, 2), labels)
        for first in range(0, len(draws), _RECORDS_AT_ONCE):
            places = range(first, min(first + _RECORDS_AT_ONCE, len(draws)))
            pending = {place: self.candidates(draws[place]) for place in places}
            while pending:
                pending = self._try_candidates(pending, draws, pixels.numpy(), labels.numpy())
        return batch

    def expect(self, numbers: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        """Tell the source which draws come in this pass, and in the next one."""
        self.source.expect(self.indices(numbers), self.indices(following))

    def reached(self, position: int) -> None:
        """Tell the source how many samples of the pass have been handed out."""
        self.source.reached(position)

    def close(self) -> None:
        """Let the source close its files and connections."""
        self.source.close()

    @abstractmethod
    def indices(self, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images of draws, without substitutes."""

    def _try_candidates(
        self,
        pending: dict[int, Iterator[int]],
        draws: Sequence[int],
        pixels: NDArray[np.uint8],
        labels: NDArray[np.int64],
    ) -> dict[int, Iterator[int]]:
        """Write the next candidate of each place into the batch, and return the places where it could not be read."""
        candidates = {place: self._next_candidate(more) for place, more in pending.items()}
        numbers = {place: number for place, number in candidates.items() if number is not None}
        records = self.source.read(list(numbers.values()))
        for number, record in zip(numbers.values(), records, strict=True):
            # Storage that cannot be reached says nothing about the image: to go on would train on substitutes.
            if isinstance(record, Exception) and not is_damage(record):
                raise storage_error(self.source.name(number), record) if isinstance(record, OSError) else record
        failed = [
            place
            for (place, number), record in zip(numbers.items(), records, strict=True)
            if not self._decode(number, draws[place], record, pixels[place])
        ]
        for place in failed:
            pixels[place] = 0  # clears what was decoded before the error
        for place in numbers.keys() - set(failed):
            labels[place] = self.source.labels[numbers[place]]
        return {place: pending[place] for place in failed}

    def _next_candidate(self, candidates: Iterator[int]) -> int | None:
        for number in candidates:
            if number not in self.unreadable:
                return number
            self.unreadable.refuse_all()  # candidates may be endless
        return None

    def _decode(self, number: int, draw: int, record: bytes | Exception, square: NDArray[np.uint8]) -> bool:
        """Decode a record into a square. If it is damaged, count the image, and return False."""
        try:
            if isinstance(record, Exception):
                raise record
            self.decode(record, lambda width, height: self.crop(width, height, draw), square)
        except Exception as error:  # Pillow's decoders raise anything: OSError, SyntaxError, struct.error, ...
            if not is_damage(error):
                raise
            if number not in self.unreadable:  # it may be in this batch twice
                self.unreadable.add(number, error)
            return False
        return True


class TrainingImages(ImageFolder):
    """Randomly cropped and mirrored images. Another image replaces an unreadable one.

    Randomness depends only on the seed and the draw, not on the batch, the number of workers or processes, nor on
    whether the run was interrupted. Ranks that share a replica therefore read the same.

    A sample is taken by its draw, `epoch * len(self) + index`, as `TrainingSampler` counts, so that an image is cropped
    differently in each epoch. A plain index is a draw of epoch 0. A warning tells if these are used for a second epoch.

    Args:
        root: the folder that holds the class folders, `root/class/image.jpg`, or a source of records.
        image_size: width and height of the images returned, pixels.
        max_unreadable: how many images may be unreadable before it is an error.
        minimum_scale: the smallest share of an image's area that a crop may have.
        flip: mirror half of the images.
        seed: of crops, mirroring and substitutes.
        crop: `resized`, a part of random size and shape; or `window`, a random square of `image_size` pixels as they
            are, for images that were resized when they were packed.
        decoder: `simplejpeg`, `pillow`, or `auto`, simplejpeg if it is installed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | RecordSource,
        image_size: int = 224,
        max_unreadable: int = 100,
        minimum_scale: float = 0.08,
        flip: bool = True,
        seed: int = 0,
        crop: str = "resized",
        decoder: str = "auto",
    ) -> None:
        if crop not in ("resized", "window"):
            raise ValueError(f"crop={crop!r}, but it must be resized or window.")
        super().__init__(root, image_size, max_unreadable, decoder)
        self.minimum_scale = minimum_scale
        self.flip = flip
        self.seed = seed
        self.resized = crop == "resized"
        # In shared memory: a plain DataLoader starts new worker processes in each epoch.
        self._first = torch.full((), _NOTHING_DRAWN, dtype=torch.int64, device="cpu")
        self._first.share_memory_()  # type: ignore[no-untyped-call]

    @override
    def expect(self, numbers: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        if len(following) and following.min() >= len(self):  # the sampler counts epochs, so no draw comes twice
            self._first.fill_(_NOT_WATCHED)
        super().expect(numbers, following)

    @override
    def __getitems__(self, draws: Sequence[int]) -> ImageBatch:
        first = int(self._first)
        if first == _NOTHING_DRAWN and len(draws):
            self._first.fill_(draws[0] if draws[0] < len(self) else _NOT_WATCHED)
        elif first >= 0 and first in draws:
            self._first.fill_(_NOT_WATCHED)
            warnings.warn(_SAME_CROPS.format(draw=first), RuntimeWarning, stacklevel=2)
        return super().__getitems__(draws)

    @override
    def candidates(self, draw: int) -> Iterator[int]:
        yield draw % len(self)
        substitutes = random.Random(f"{self.seed}/{draw}/substitutes")
        while True:
            yield substitutes.randrange(len(self))

    @override
    def crop(self, width: int, height: int, draw: int) -> Crop:
        rng = random.Random(f"{self.seed}/{draw}")
        if self.resized:
            return random_crop(width, height, self.minimum_scale, self.flip, rng)
        return window_crop(width, height, self.image_size, self.flip, rng)

    @override
    def indices(self, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        return draws % len(self)


class EvaluationImages(ImageFolder):
    """The centres of the images. A blank image with the label -100 replaces an unreadable one.

    `images[len(images)]` is blank, too: samplers pad with it.

    Args:
        root: the folder that holds the class folders, `root/class/image.jpg`, or a source of records.
        image_size: width and height of the images returned, pixels.
        max_unreadable: how many images may be unreadable before it is an error.
        centre: side of the evaluated square divided by the image's shorter side.
        decoder: `simplejpeg`, `pillow`, or `auto`, simplejpeg if it is installed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | RecordSource,
        image_size: int = 224,
        max_unreadable: int = 100,
        centre: float = 0.875,
        decoder: str = "auto",
    ) -> None:
        super().__init__(root, image_size, max_unreadable, decoder)
        self.centre = centre

    @override
    def candidates(self, draw: int) -> Iterator[int]:
        return repeat(draw, 1 if draw < len(self) else 0)

    @override
    def crop(self, width: int, height: int, draw: int) -> Crop:
        return centre_crop(width, height, self.centre)

    @override
    def indices(self, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        return draws[draws < len(self)]


def _allocate(count: int, size: int) -> Tensor:
    """Return blank images to write to, uint8 `(count, size, size, 3)`."""
    if get_worker_info() is None:
        return torch.zeros(count, size, size, 3, dtype=torch.uint8, device="cpu")
    # In memory that the worker shares with the main process, as torch's default_collate does: images elsewhere would be
    # copied there. The operating system fills new memory with zeros.
    images = torch.empty(0, dtype=torch.uint8, device="cpu")
    images.set_(images.untyped_storage()._new_shared(count * size * size * 3, device="cpu"))  # type: ignore[no-untyped-call]
    return images.view(count, size, size, 3)
