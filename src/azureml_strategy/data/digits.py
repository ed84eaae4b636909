"""scikit-learn's handwritten digits as image files: a real data set that needs no download."""

from __future__ import annotations

import os
import random
from pathlib import Path

from PIL import Image
from typing_extensions import override

from azureml_strategy.data.folders import DataFolderError, user_cache, written_once
from azureml_strategy.data.modules import ImageFolderDataModule
from azureml_strategy.data.sampler import require

_PIXELS = 32
_BRIGHTEST = 16  # the digits have 17 grey levels
_QUALITY = 95
_SPLIT_SEED = 0
_SHARD_BYTES = 250_000  # seven for training: enough for a window of some
_FOLDER = "validation-"  # followed by the fraction


class DigitsDataModule(ImageFolderDataModule):
    """The 1,797 digits that come with scikit-learn, written once as JPEG files and read like any image set.

    They are the test set of https://archive.ics.uci.edu/dataset/80: 8 x 8 pixels, here enlarged to 32 x 32. Digits are
    not mirrored, and cropped only a little.

    Args:
        root: a folder of digits that an earlier run wrote, or an empty folder to write them into; None for
            `azureml_strategy/digits` in the user's cache, `~/.cache` or XDG_CACHE_HOME.
        image_size: width and height of the images returned, pixels.
        batch_size: images per step and process.
        num_workers: decoding processes per dataloader. 0 decodes in the training process, which for such small images
            costs less than transferring them between processes.
        validation_fraction: share of the digits for validation, the same ones in each run.
        minimum_scale: the smallest share of an image's area that a training crop may have.
        shards: pack the files into shards and read those, as for a large set.
        decoder: `simplejpeg`, `pillow`, or `auto`.

    Raises:
        ValueError: an argument is out of range.
        DataFolderError: `root` does not exist, or holds something else.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        image_size: int = 32,
        batch_size: int = 32,
        num_workers: int | None = 0,
        validation_fraction: float = 0.2,
        minimum_scale: float = 0.7,
        shards: bool = False,
        decoder: str = "auto",
    ) -> None:
        rule = "between 0 and 1, both left out"
        require("validation_fraction", validation_fraction, 0 < validation_fraction < 1, rule)
        self.validation_fraction = validation_fraction
        # Each fraction gets a folder of its own.
        self.files = _place(root) / f"{_FOLDER}{validation_fraction:g}"
        super().__init__(
            self.files.with_name(f"{self.files.name}-shards") if shards else self.files,
            image_size=image_size,
            batch_size=batch_size,
            num_workers=num_workers,
            max_unreadable=0,
            minimum_scale=minimum_scale,
            flip=False,
            evaluation_centre=1.0,
            decoder=decoder,
        )

    @override
    def prepare_data(self) -> None:
        """Write the files unless they exist, and pack them."""
        write_digits(self.files, self.validation_fraction)
        if self.root != self.files:
            pack_digits(self.files, Path(self.root))


def _place(root: str | os.PathLike[str] | None) -> Path:
    """Return the folder of the digits.

    A missing folder, or one of other images, is refused: a misspelt name would go unnoticed.
    """
    if root is None:
        return user_cache() / "digits"
    folder = Path(root).expanduser()
    others = [each.name for each in sorted(folder.glob("*")) if not each.name.startswith((_FOLDER, "."))]
    if folder.is_dir() and not others:
        return folder
    seen = f"holds {others[0]} and is no folder of digits" if folder.is_dir() else "is no folder that there is"
    raise DataFolderError(
        f"The handwritten digits were to be in {folder}, which {seen}. Leave data.root out, and they are written into "
        f"your cache; or type `mkdir -p {folder}` for a new folder. Images of your own are another data set: "
        f"data=imagenet data.root={folder} num_classes=..."
    )


def write_digits(folder: Path, validation_fraction: float) -> None:
    """Write the digits as `folder/{train,val}/{0..9}/NNNN.jpg`, all or nothing, as `written_once` does."""
    with written_once(folder, ".digits-") as scratch:
        if scratch is None:
            return
        from sklearn.datasets import load_digits  # half a second to import, needed once

        digits = load_digits()
        total = len(digits.images)
        validation = set(random.Random(_SPLIT_SEED).sample(range(total), round(total * validation_fraction)))
        for part in ("train", "val"):
            for label in range(10):
                (scratch / part / str(label)).mkdir(parents=True)
        for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            part = "val" if number in validation else "train"
            image = Image.fromarray((pixels * (255 / _BRIGHTEST)).astype("uint8"))
            image = image.resize((_PIXELS, _PIXELS), Image.Resampling.BICUBIC)
            image.save(scratch / part / str(label) / f"{number:04}.jpg", quality=_QUALITY)


def pack_digits(files: Path, folder: Path) -> None:
    """Pack what `write_digits` has written into shards, `folder/{train,val}`, all or nothing."""
    from azureml_strategy.data.packing.images import ImageForm
    from azureml_strategy.data.packing.pack import Packing, pack
    from azureml_strategy.data.packing.sources import find_images

    with written_once(folder, ".digits-") as scratch:
        if scratch is not None:
            pack(Packing(find_images(files, ImageForm()), scratch, {}, _SHARD_BYTES))
