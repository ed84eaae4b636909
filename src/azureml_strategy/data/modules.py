"""The data module for images in class folders, and for images packed into shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from azureml_strategy.data.folders import DataFolderError, list_class_folders, resolve_place
from azureml_strategy.data.images import EvaluationImages, ImageFolder, TrainingImages, collate_images
from azureml_strategy.data.readers import choose_cache, find_index, is_packed, join, parse_bytes
from azureml_strategy.data.sampler import (
    EvaluationSampler,
    PlannedLoader,
    ResumableLoader,
    TrainingSampler,
    WindowSampler,
    default_num_workers,
    global_seed,
    loader_options,
    rank_0_if_different,
    replica,
    require,
)
from azureml_strategy.data.shard_index import INDEX_NAME
from azureml_strategy.data.sharded_images import ShardedImages
from azureml_strategy.data.storage import is_remote

ImageLoader = DataLoader[tuple[Tensor, int]]


class ImageFolderDataModule(LightningDataModule):
    """Images in class folders, `root/train/class/image.jpg` and `root/val/class/image.jpg`, or packed, as ImageNet's.

    A packed set has shards in `root/train` and `root/val`: `azureml-strategy data pack` makes it, and WebDataset's tar
    files are one. It is read from a folder, a mount, or Blob Storage.

    Batches are `(images, labels)`: uint8 `(batch_size, 3, image_size, image_size)` in channels_last, to be normalised
    on the device, and int64 `(batch_size,)`. No metric may count a label of -100.

    Training images are shuffled by epoch and `seed_everything`'s seed. In an evaluation, exactly one replica reads each
    image, and all ranks take the same number of steps.

    Args:
        root: the folder, or the address in Blob Storage, with the sets for training and validation.
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
        decoder: `simplejpeg`, which is faster and needs the extra `data`; `pillow`; or `auto`, the first if installed.
        crop: of training images: `resized`, of random size and shape, or `window`, `image_size` pixels unscaled.
        shuffle: of a packed set: `full`, or `window`, for a set that no disk of a node can hold.
        window: with `shuffle="window"`, how many shards are drawn from at a time.
        cache: of a packed set on this node: a folder; `auto`, for a set in Blob Storage, on the largest local disk;
            None for none. A folder of shards is cached only where `cache` names a folder: `auto` reads it as it is.
        cache_limit: bytes, or as `500GB`; None for nine tenths of what is free there.

    Raises:
        ValueError: an argument is out of range, or not exactly one of `root` and `input_name` is given.
        DataFolderError: the job has no input of that name; in `setup`, a folder is missing or empty, or the classes of
            the two folders differ.
        ShardIndexError, StorageError: in `setup`, the packed set is damaged, or cannot be reached.
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
        decoder: str = "auto",
        crop: str = "resized",
        shuffle: str = "full",
        window: int = 16,
        cache: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
    ) -> None:
        super().__init__()
        require("image_size", image_size, image_size >= 1, "1 pixel or more")
        require("batch_size", batch_size, batch_size >= 1, "1 or more: images a step and process")
        require("num_workers", num_workers or 0, (num_workers or 0) >= 0, "0 or more, or None to choose")
        require("max_unreadable", max_unreadable, max_unreadable >= 0, "0 or more")
        require("minimum_scale", minimum_scale, 0 < minimum_scale <= 1, "above 0 and up to 1")
        require("evaluation_centre", evaluation_centre, 0 < evaluation_centre <= 1, "above 0 and up to 1")
        require("shuffle", shuffle, shuffle in ("full", "window"), "full or window")
        require("window", window, window >= 1, "1 shard or more")
        place = resolve_place(root, input_name, os.environ)
        self.root: Path | str = place if is_remote(place) else Path(place).expanduser()
        self.train_folder, self.val_folder = train_folder, val_folder
        self.image_size, self.batch_size, self.num_workers = image_size, batch_size, num_workers
        self.max_unreadable, self.decoder = max_unreadable, decoder
        self.minimum_scale, self.flip, self.crop = minimum_scale, flip, crop
        self.evaluation_centre, self.shuffle, self.window = evaluation_centre, shuffle, window
        self.cache = cache
        self.cache_limit = None if cache_limit is None else parse_bytes(cache_limit)
        self.num_classes: int | None = None
        self._train: TrainingImages | None = None
        self._val: EvaluationImages | None = None

    @override
    def prepare_data(self) -> None:
        """Index tar files that have no index, by one process of each node."""
        for folder in (self.train_folder, self.val_folder):
            place = join(self.root, folder)
            if is_packed(place) and not is_remote(place):
                find_index(Path(place))

    @override
    def setup(self, stage: str) -> None:
        """List the images that the stage needs, once."""
        if self._val is None:
            self._val = EvaluationImages(
                self._source(self.val_folder),
                self.image_size,
                self.max_unreadable,
                self.evaluation_centre,
                decoder=self.decoder,
            )
            self.num_classes = len(self._val.classes)
            self._check_same_everywhere(self._val)
            if stage != "fit":
                self._compare_with_training(self._val)
        if stage == "fit" and self._train is None:
            self._train = TrainingImages(
                self._source(self.train_folder),
                self.image_size,
                self.max_unreadable,
                self.minimum_scale,
                self.flip,
                global_seed(),
                crop=self.crop,
                decoder=self.decoder,
            )
            _check_same_classes(self._train.source.root, self._train.classes, self._val.source.root, self._val.classes)
            self._check_same_everywhere(self._train)

    @override
    def teardown(self, stage: str) -> None:
        """Close the connection to the node's cache, which ends with its last user."""
        for images in (self._train, self._val):
            if images is not None:
                images.close()

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
                f"{join(self.root, self.train_folder)} has {len(self._train)} images, fewer than one global batch: "
                f"batch_size={self.batch_size} on each of {replicas} replicas. An epoch would have no step. Set "
                f"data.batch_size={len(self._train) // replicas} or less, or use fewer processes."
            )
        sampler = self._sampler(self._train, replicas, rank)
        return ResumableLoader(self.loaded(self._train), sampler=sampler, **self._loader_options())

    @override
    def val_dataloader(self) -> ImageLoader:
        """Return every validation image once, in order."""
        assert self._val is not None, "setup() lists the images"
        sampler = EvaluationSampler(self._val, *replica(self.trainer))
        return PlannedLoader(self.loaded(self._val), sampler=sampler, **self._loader_options())

    @override
    def test_dataloader(self) -> ImageLoader:
        """Return the same as for validation: ImageNet's test set has no labels."""
        return self.val_dataloader()

    @property
    def collate(self) -> Callable[[Any], Any]:
        """Make a batch of what the loaders have read."""
        return collate_images

    def loaded(self, images: ImageFolder) -> Dataset[Any]:
        """Return what the loaders read: the images themselves. A subclass may put something in between."""
        return images

    def _source(self, folder: str) -> ShardedImages | str:
        place = join(self.root, folder)
        if not is_packed(place):
            return place
        # `auto` leaves a folder alone: a local disk needs no cache, and Azure ML's mounts have one of their own.
        is_cached = self.cache != "auto" or is_remote(place)
        return ShardedImages(place, cache=choose_cache(self.cache, self.cache_limit) if is_cached else None)

    def _compare_with_training(self, val: EvaluationImages) -> None:
        """Compare the classes with those of training, if that is here: a model's outputs are in their order."""
        place = join(self.root, self.train_folder)
        if is_remote(place):
            return
        folder = Path(place)
        if (folder / INDEX_NAME).is_file():
            _check_same_classes(place, find_index(folder).classes, val.source.root, val.classes)
        elif not is_packed(place) and folder.is_dir() and any(each.is_dir() for each in folder.iterdir()):
            _check_same_classes(place, list_class_folders(folder)[0], val.source.root, val.classes)

    def _sampler(self, images: TrainingImages, replicas: int, rank: int) -> TrainingSampler:
        source = images.source
        if self.shuffle == "full":
            _warn_of_small_cache(source)
            return TrainingSampler(images, replicas, rank, global_seed())
        if not isinstance(source, ShardedImages):
            raise DataFolderError(
                f"shuffle='window' shuffles shards, and {join(self.root, self.train_folder)} has class folders. Pack "
                "them, azureml-strategy data pack SRC OUT, or leave data.shuffle=full."
            )
        return WindowSampler(images, replicas, rank, global_seed(), source.index.shard, self.window)

    def _check_same_everywhere(self, images: ImageFolder) -> None:
        """Refuse packed sets that differ between ranks, as where a new version was registered a moment ago."""
        if self.trainer is None or images.digest is None:
            return
        first = rank_0_if_different(self.trainer, images.digest)
        if first is not None:
            raise DataFolderError(
                f"{images.source.root} has the index {images.digest} on rank {self.trainer.global_rank}, and {first} "
                "on rank 0, and all ranks have to read one set. Name its version instead of the latest, "
                "data.root=azureml:NAME:VERSION, or give all nodes the same folder."
            )

    def _loader_options(self) -> dict[str, Any]:
        workers = self.num_workers
        if workers is None:
            workers = default_num_workers(self.trainer.num_devices if self.trainer is not None else 1)
        return {**loader_options(self.trainer, self.batch_size, workers), "collate_fn": self.collate}


def _warn_of_small_cache(source: Any) -> None:
    """Warn if the cache cannot hold the set: a full shuffle reads at random, so each epoch reads storage again."""
    if not isinstance(source, ShardedImages) or not is_remote(source.root):
        return
    size = int(source.index.length.sum(dtype="int64"))
    limit = source.cache.limit if source.cache is not None else 0
    if size > limit:
        rank_zero_warn(
            f"{source.root} has {size / 1e6:,.0f} MB, and this node's cache may take {limit / 1e6:,.0f} MB: with "
            "data.shuffle=full, images that it does not hold are read from storage again in each epoch, one by one. "
            "Give it room, data.cache_limit=... and data.cache=FOLDER, or set data.shuffle=window."
        )


def _check_same_classes(train: str, train_classes: Sequence[str], val: str, val_classes: Sequence[str]) -> None:
    """Refuse folders with different classes: a label is the index of a class, so it would mean two things."""
    if list(train_classes) == list(val_classes):
        return
    only_one = sorted(set(train_classes) ^ set(val_classes))
    raise DataFolderError(
        f"{train} has {len(train_classes)} class folders and {val} has {len(val_classes)}; only in one of them: "
        f"{', '.join(only_one[:5])}. A label is the place of its class "
        "among the sorted names, so both need the same folders: add the missing ones, empty if there are no images."
    )
