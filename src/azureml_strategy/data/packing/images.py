"""Makes the record of an image for a packed set: checked and copied as it is, made smaller once, or decoded."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from azureml_strategy.data.folders import written_once
from azureml_strategy.data.packing.shards import PackError, Record, Records, UnreadableError
from azureml_strategy.data.pillow_images import is_damage, open_image, to_rgb
from azureml_strategy.files import read_range

if TYPE_CHECKING:
    from PIL import Image

_SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp"}
# How many images are packed for a try, to learn how large a record is.
_PROBED = 256
_CLASSES = "classes.json"
_ARRAYS = ("files", "titles", "file", "offset", "length", "label", "place")


@dataclass(frozen=True)
class ImageForm:
    """What becomes of each image.

    Attributes:
        resize: pixels of the shorter side; an image that is smaller keeps its size. None copies the file as it is.
        quality: of the JPEG that is written of a resized image, 1 to 100.
        raw: pixels in numpy's format instead of a JPEG.
    """

    resize: int | None = None
    quality: int = 90
    raw: bool = False

    def encode(self, content: bytes) -> tuple[str, bytes]:
        """Return the suffix and the content of an image file's record.

        Raises:
            UnreadableError: it cannot be decoded.
        """
        try:
            with open_image(content) as image:
                return self._encode(image, content)
        except UnreadableError:
            raise
        except Exception as error:  # Pillow's decoders raise anything: OSError, SyntaxError, struct.error, ...
            if not is_damage(error):
                raise
            raise UnreadableError(f"{type(error).__name__}: {error}") from error

    def _encode(self, image: Image.Image, content: bytes) -> tuple[str, bytes]:
        if self.resize is None:
            _check(image)
            return _SUFFIXES[str(image.format)], content
        if not self.raw and image.format == "JPEG" and image.mode in ("RGB", "L") and min(image.size) <= self.resize:
            _check(image)
            return "jpg", content  # to encode it once more would only lose
        smaller = _shrink(image, self.resize)
        written = io.BytesIO()
        if self.raw:
            np.save(written, np.asarray(smaller))
            return "npy", written.getvalue()
        smaller.save(written, "JPEG", quality=self.quality, subsampling="4:2:0")
        return "jpg", written.getvalue()


def _check(image: Image.Image) -> None:
    """Decode an image at the smallest size that its format offers: this reads all of it, and costs the least."""
    image.draft(None, (1, 1))
    image.load()


def _shrink(image: Image.Image, shorter: int) -> Image.Image:
    from PIL import Image

    width, height = image.size
    scale = min(1.0, shorter / min(width, height))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    # A JPEG may be decoded at a fraction of its size, but at no less than twice the size wanted, so that Lanczos sees
    # no pixels that are coarser than those it makes (Pillow's `reducing_gap=2`).
    image.draft(None, (2 * size[0], 2 * size[1]))
    pixels = to_rgb(image)
    # Lanczos keeps details that a box filter blurs and that a training crop needs. It costs less than the decoding.
    return pixels if pixels.size == size else pixels.resize(size, Image.Resampling.LANCZOS)


@dataclass(frozen=True, eq=False)
class Samples:
    """Where the images of a source lie. An image is a part of a file, or all of it.

    These are arrays, which a worker maps from files: a list of a million objects would be copied into every process.

    Attributes:
        root: the folder of the files.
        classes: names of the classes; the place of a class is its label.
        files: paths of the files below the root, as bytes.
        titles: what to call each of them in a message, as bytes.
        file: uint32 `(samples,)`, the number of the file of a sample.
        offset: int64 `(samples,)`, where the image begins in it, bytes.
        length: int64 `(samples,)`, bytes of the image.
        label: int32 `(samples,)`.
        place: int64 `(samples,)`, where the sample is in what the title names, in `unit`s.
        unit: `byte`, `row`, or nothing where a file is one sample.
    """

    root: str
    classes: tuple[str, ...]
    files: NDArray[np.bytes_]
    titles: NDArray[np.bytes_]
    file: NDArray[np.uint32]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    label: NDArray[np.int32]
    place: NDArray[np.int64]
    unit: str = ""

    def save(self, folder: Path) -> None:
        """Write the arrays into a folder that does not exist yet, all or nothing."""
        with written_once(folder, f".{folder.name}.") as scratch:
            assert scratch is not None, "the caller has seen that there is no such folder"
            scratch.mkdir()
            for name in _ARRAYS:
                np.save(scratch / f"{name}.npy", getattr(self, name))
            (scratch / _CLASSES).write_text(json.dumps(self.classes))

    def read(self, number: int) -> bytes:
        """Return an image as it lies in the source."""
        path = os.path.join(self.root, os.fsdecode(self.files[self.file[number]]))
        length = int(self.length[number])
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = read_range(file, length + 1, int(self.offset[number]))
        finally:
            os.close(file)
        if len(content) < length or (not self.unit and len(content) > length):
            raise PackError(f"{self.title(number)} was changed while it was packed. Pack what no longer changes.")
        return content[:length]

    def title(self, number: int) -> str:
        """Return a name for messages: `cat/1.jpg`, or `train-00000.parquet, row 17`."""
        title = os.fsdecode(self.titles[self.file[number]])
        return f"{title}, {self.unit} {self.place[number]}" if self.unit else title


@dataclass(frozen=True)
class ImageRecords(Records):
    """The images of a source, in the form in which they are packed; `root`, `classes` and `unit` as in `Samples`."""

    root: str
    classes: tuple[str, ...]
    unit: str
    folder: Path  # where `Samples.save` has written its arrays
    form: ImageForm
    noun = "images"
    shuffled = True

    @property
    def kind(self) -> str:  # type: ignore[override]
        """As `ShardIndex.kind`."""
        return "raw" if self.form.raw else "images"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_samples"}

    @cached_property
    def _samples(self) -> Samples:
        arrays = {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        return Samples(self.root, self.classes, **arrays, unit=self.unit)

    @override
    def __len__(self) -> int:
        return len(self._samples.file)

    @override
    def record(self, number: int) -> Record:
        try:
            content = self._samples.read(number)
        except (FileNotFoundError, PermissionError) as error:
            raise UnreadableError(error.strerror) from error
        return Record(*self.form.encode(content), int(self._samples.label[number]))

    @override
    def name(self, number: int) -> str:
        return self._samples.title(number)

    @override
    def mean_bytes(self, order: NDArray[np.int64]) -> float:
        if self.form.resize is None:
            return float(np.mean(self._samples.length))
        sizes = []
        reason = ""
        for number in order[:_PROBED].tolist():
            try:
                sizes.append(len(self.record(number).content))
            except UnreadableError as error:
                reason = f"{self.name(number)} ({error})"
        if not sizes:
            raise PackError(f"None of the first images can be read; the last: {reason}. Is this a set of images?")
        return float(np.mean(sizes))

    @override
    def facts(self) -> dict[str, Any]:
        if self.form.resize is None:
            return {}
        return {"resize": self.form.resize} | ({} if self.form.raw else {"quality": self.form.quality})


def image_records(work: Path, root: str, unit: str, form: ImageForm, find: Callable[[], Samples]) -> ImageRecords:
    """Return the records of the samples that `find` returns. It is called only if no earlier run has written them."""
    folder = work / "samples"
    if not folder.is_dir():
        find().save(folder)
    return ImageRecords(root, tuple(json.loads((folder / _CLASSES).read_text())), unit, folder, form)


def refuse_full_size(examples: Iterable[bytes]) -> None:
    """Refuse to pack pixels in full size, and say by some of the images how much they would take.

    Raises:
        PackError: always.
    """
    files = pixels = 0
    for content in islice(examples, _PROBED):
        try:
            with open_image(content) as image:
                pixels += 3 * image.width * image.height
                files += len(content)
        except Exception:  # Pillow's decoders raise anything
            continue
    times = f"about {pixels / files:.0f} times" if files else "many times"
    raise PackError(f"--raw in full size takes {times} as much as the files. Type to which size: --raw --resize 256")
