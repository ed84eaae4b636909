"""Packed images as a data set: any sample by its number, from a folder, a mount or Blob Storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset
from typing_extensions import override

from azureml_strategy.data.node_cache.protocol import CacheSettings
from azureml_strategy.data.npy_files import read_npy
from azureml_strategy.data.pillow_images import open_image, to_rgb
from azureml_strategy.data.readers import choose_cache, open_reader
from azureml_strategy.data.shard_index import ShardIndex, ShardIndexError, warn_of_unread_files


class ShardedImages(Dataset[tuple[Any, int]]):
    """The images of a packed set, by number; the order is the sampler's.

    Use it in a script of your own, with a transform of torchvision or albumentations, or let `TrainingImages` and
    `EvaluationImages` decode and crop. It works in workers that are forked or spawned, and takes part in the cache of
    the node where the loader is a `ResumableLoader` or `PlannedLoader`, which tell it what comes next.

    Args:
        root: the folder of the set, or its address: `az://container/path`, `https://ACCOUNT.blob.core.windows.net/...`,
            `azureml://datastores/NAME/paths/...`, `azureml:NAME:VERSION`.
        transform: maps a `PIL.Image` to what a sample holds; None gives RGB pixels, uint8 `(height, width, 3)`.
        cache: the cache of the node, its settings or just its folder; None reads a folder directly, and an address by
            streaming.

    Raises:
        ShardIndexError: there is no such set, it is damaged, or it holds something else than images.
        StorageError: the storage cannot be reached, or refuses.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        cache: CacheSettings | str | os.PathLike[str] | None = None,
    ) -> None:
        self.root = os.fspath(root)
        self.transform = transform
        self.cache = cache if isinstance(cache, CacheSettings) else choose_cache(cache, None)
        self.reader = open_reader(self.root, self.cache)
        if self.index.kind not in ("images", "raw"):
            raise ShardIndexError(f"{self.root} holds {self.index.kind}, not images. Read tokens by data=text.")
        warn_of_unread_files(self.root, self.index)

    @property
    def index(self) -> ShardIndex:
        """Where each record lies."""
        return self.reader.index

    @property
    def digest(self) -> str:
        """Hash of the index: it tells one set, and one version of a set, from another."""
        return self.index.digest

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; the place of a class is its label."""
        return self.index.classes

    @property
    def labels(self) -> NDArray[np.int32]:
        """The label of each sample."""
        return self.index.label

    def __len__(self) -> int:
        return len(self.index)

    def name(self, number: int) -> str:
        """Say where a sample lies, for a message."""
        return f"{self.root}: {self.index.name(number)}"

    def read(self, numbers: Sequence[int]) -> list[bytes | Exception]:
        """Return the records as they were packed; in place of one that is damaged or cannot be read, the error."""
        return self.reader.read(numbers)

    @override
    def __getitem__(self, number: int) -> tuple[Any, int]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[Any, int]]:
        """Return several samples. A loader asks for a batch at once, which storage serves in one go.

        Raises:
            RecordError: a record cannot be read, or is damaged.
        """
        return [
            (self._decoded(each), int(self.labels[number]))
            for each, number in zip(self.read(numbers), numbers, strict=True)
        ]

    def _decoded(self, record: bytes | Exception) -> Any:
        from PIL import Image

        if isinstance(record, Exception):
            raise record
        if self.index.kind == "raw":
            pixels = read_npy(record)
            return pixels if self.transform is None else self.transform(Image.fromarray(pixels))
        image = to_rgb(open_image(record))
        return np.array(image) if self.transform is None else self.transform(image)

    def expect(self, numbers: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        """Tell the cache what will be read in this pass through the data, and in the next one."""
        self.reader.expect(numbers, following)

    def reached(self, position: int) -> None:
        """Tell the cache how many samples of the pass have been handed out."""
        self.reader.reached(position)

    def close(self) -> None:
        """Close files, and the connection to the node's cache. The next read opens them again."""
        self.reader.close()
