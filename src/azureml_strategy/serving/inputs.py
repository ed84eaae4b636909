"""Reads samples from a request or a file. What the model was not trained on is refused with one sentence."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from azureml_strategy.checkpoint.module_record import read_input
from azureml_strategy.data.npy_files import NPY, read_npy
from azureml_strategy.data.pillow_images import open_image, to_mode
from azureml_strategy.files import read_whole

Numbers = npt.NDArray[Any]
IMAGES = (".png", ".jpg", ".jpeg", ".bmp")
"""Files that hold one sample each, as pixels."""
MAX_BYTES = 16 * 2**20
"""The largest body of a request. Our choice, some times what Azure ML itself lets through."""
MAX_FILE_BYTES = 2**30
"""The largest file of samples for a batch endpoint. Our choice. The numbers in a file of JSON are limited as well."""
MAX_NUMBERS = 2**22
"""The most numbers in an answer. Our choice: as JSON they take some 80 MB, and as Python's floats twice that."""
MAX_TOKENS = 2**17
"""The most tokens in a request whose samples are rows of any length. Our choice: longer than most contexts."""
MAX_VARIED = 2**22
"""The most numbers of a sample of another kind whose sizes vary: an image of 1,024 x 1,024, and more."""
MAX_TOGETHER = 2**24
"""The most numbers in a request of such samples: as many as fit into a body of bytes, one byte each."""
MAX_PIXELS = 2**26
"""The most pixels of an image. Our choice: as RGB they take 200 MB."""
# Limits of JSON, which takes more memory here than on the way: a list of 3 bytes takes some 64, a number of 4 some 36.
_MAX_LISTS, _MAX_VALUES = 2**20, 2**24
_RAGGED = "The samples are no regular array: lists side by side have unequal lengths. Send samples of one shape."
_BY_NUMBERS = "the numbers of one sample after the other in nested lists"


class BadInputError(ValueError):
    """Input that the model cannot take. The message is for the client: what was seen, and what to send."""


@dataclass(frozen=True)
class ExpectedInput:
    """The input that a model takes.

    Attributes:
        sizes: shape of one sample, without the dimension that counts samples; a size that may vary is None. None in
            place of the shape means that it is not known.
        dtype: type of the numbers.
        max_samples: the most samples at a time.
    """

    sizes: tuple[int | None, ...] | None
    dtype: torch.dtype
    max_samples: int

    @classmethod
    def of(cls, record: Mapping[str, Any] | None, max_samples: int) -> ExpectedInput:
        """Read what a checkpoint has recorded of the input. Without a record, samples are of any shape and float32."""
        if record is None:
            return cls(None, torch.float32, max_samples)
        return cls(*read_input(record), max_samples)

    @property
    def shape(self) -> str:
        """The shape of a request, for messages."""
        sizes = ("...",) if self.sizes is None else tuple("any" if each is None else str(each) for each in self.sizes)
        return f"({', '.join(('N', *sizes))})"

    def checked(self, numbers: Numbers) -> Tensor:
        """Turn numbers into what the model takes.

        Args:
            numbers: `(N, *sizes)`.

        Raises:
            BadInputError: they are of another shape or kind, or there are none or too many.
        """
        if numbers.dtype.kind not in "iuf":
            raise BadInputError(f"The samples hold something other than numbers. Send {_BY_NUMBERS}.")
        if not numbers.size:
            raise BadInputError(f"There is no number in what was sent. Send one sample or more, {self.shape}.")
        self._check_shape(numbers.shape)
        self._check_count(len(numbers), numbers.size)
        if not np.isfinite(numbers).all():
            raise BadInputError("The samples hold NaN or infinity. Send finite numbers only.")
        self._check_range(numbers)
        return torch.from_numpy(np.array(numbers, _numpy(self.dtype), order="C")).to(self.dtype)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        sizes = shape[1:] if self.sizes is None else self.sizes
        pairs = list(zip(sizes, shape[1:], strict=False))
        if len(shape) != len(sizes) + 1 or any(have != size and size is not None for size, have in pairs):
            raise BadInputError(f"The samples have the shape {shape}, but the model takes {self.shape}. Send that.")
        if shape[0] > self.max_samples:
            raise BadInputError(
                f"There are {shape[0]:,} samples, and at most {self.max_samples:,} at a time are taken. Send fewer, "
                "several times."
            )

    def _check_count(self, samples: int, count: int) -> None:
        """Limit a request whose sizes vary: what the model needs grows with them, perhaps faster than they do."""
        if self.sizes is not None and None not in self.sizes:
            return
        rows = self.sizes is not None and len(self.sizes) == 1 and not self.dtype.is_floating_point
        most = MAX_TOKENS if rows else min(MAX_TOGETHER, samples * MAX_VARIED)
        if count > most:
            raise BadInputError(
                f"There are {count:,} numbers, and at most {most:,} at a time are taken by a model whose samples may "
                "have any size. Send fewer or smaller samples, several times."
            )

    def _check_range(self, numbers: Numbers) -> None:
        kind = np.dtype(_numpy(self.dtype))
        if kind.kind == "f":
            if np.abs(numbers).max() > np.finfo(kind).max:
                raise BadInputError(f"A number is too large for the model's {kind}. Send smaller ones.")
            return
        limits = np.iinfo(kind)
        if numbers.dtype.kind == "f" and (numbers != np.floor(numbers)).any():
            raise BadInputError(f"The model takes whole numbers from {limits.min} to {limits.max}, and got fractions.")
        if numbers.min() < limits.min or numbers.max() > limits.max:
            raise BadInputError(
                f"The model takes whole numbers from {limits.min} to {limits.max}, and got {numbers.min():g} to "
                f"{numbers.max():g}. Send numbers of that range."
            )


def _numpy(dtype: torch.dtype) -> Any:
    """The NumPy type for a torch type. NumPy has no bfloat16, so that float32 takes its place."""
    return np.float32 if dtype is torch.bfloat16 else torch.empty(0, dtype=dtype).numpy().dtype


def read_body(body: bytes) -> Numbers:
    """Read the samples of a request: JSON `{"data": [...]}`, or the bytes of a `.npy` file.

    Raises:
        BadInputError: the body is empty or neither.
    """
    if not body:
        raise BadInputError('The request is empty. Send JSON, {"data": [SAMPLE, ...]}, or the bytes of a .npy file.')
    return _read_npy(body) if body.startswith(NPY) else _read_json(body)


def read_file(path: Path, expected: ExpectedInput) -> Tensor:
    """Read the samples of a file: `.npy` or `.json` with one or more, or an image.

    Args:
        path: the file; its suffix tells its kind.
        expected: what the model takes. An `.npy` file may hold one sample without the dimension that counts samples.

    Raises:
        BadInputError: the file is of another kind, cannot be read as what its name says, or does not fit the model.
    """
    suffix = path.suffix.lower()
    if suffix in IMAGES:
        return expected.checked(_read_image(path, expected)[None])
    if suffix not in (".npy", ".json"):
        raise BadInputError(f"{path.name} is no file of samples. Send .npy, .json or {', '.join(IMAGES)}.")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise BadInputError(
            f"{path.name} has {size / 2**20:,.0f} MiB, and at most {MAX_FILE_BYTES / 2**20:,.0f} are read. Make "
            "several files of it."
        )
    numbers = read_body(path.read_bytes())
    one = expected.sizes is not None and numbers.ndim == len(expected.sizes)
    return expected.checked(numbers[None] if one else numbers)


def _read_json(body: bytes) -> Numbers:
    # Each number but the first follows a comma or begins a list. So these counts limit the values before any is parsed.
    lists, values = body.count(b"[") + body.count(b"{"), body.count(b",")
    if lists > _MAX_LISTS or values > _MAX_VALUES:
        raise BadInputError(
            f"The request has {values:,} numbers in {lists:,} lists, and at most {_MAX_VALUES:,} in {_MAX_LISTS:,} are "
            "read as JSON. Send fewer samples at a time, or the bytes of a .npy file."
        )
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(
            f'The request is no JSON that can be read. Send {{"data": [SAMPLE, ...]}}: {_BY_NUMBERS}.'
        ) from error
    if not isinstance(content, dict) or "data" not in content:
        kind = "an object without" if isinstance(content, dict) else f"a {type(content).__name__}, not an object with"
        raise BadInputError(f'The request is {kind} "data". Send {{"data": [SAMPLE, ...]}}.')
    data = content["data"]
    if not isinstance(data, list):
        raise BadInputError(f'"data" is a {type(data).__name__}, but must be a list of samples: {_BY_NUMBERS}.')
    _require_numbers(data)
    try:
        return np.asarray(data)
    except (ValueError, OverflowError) as error:  # lists of unequal lengths, or too deep
        raise BadInputError(_RAGGED) from error


def _refuse_constant(name: str) -> Any:
    raise BadInputError(f"The samples hold {name}. Send finite numbers only.")


def _require_numbers(data: list[Any]) -> None:
    """Refuse texts and objects before NumPy gets them: it would make all entries as long as the longest text."""
    level: list[Any] = data
    while kinds := set(map(type, level)):
        if kinds <= {int, float}:
            return
        if kinds != {list}:
            if kinds <= {int, float, list}:
                raise BadInputError(_RAGGED)
            raise BadInputError(f"The samples hold something other than numbers. Send {_BY_NUMBERS}.")
        level = list(itertools.chain.from_iterable(level))


def _read_npy(body: bytes) -> Numbers:
    try:
        numbers = read_npy(body)
    except ValueError as error:
        raise BadInputError(f"The .npy file {error}. Write it with numpy.save, as an array of numbers.") from error
    if numbers.dtype.kind not in "iuf":
        raise BadInputError(f"The .npy file holds {numbers.dtype}, and no numbers. Send an array of numbers.")
    return numbers


def _read_image(path: Path, expected: ExpectedInput) -> Numbers:
    mode = _mode(path, expected)
    assert expected.sizes is not None
    try:
        with open_image(read_whole(path)) as image:
            _check_size(path, (image.height, image.width), expected.sizes[-2:])
            pixels = np.asarray(to_mode(image, mode))  # as in training
    except BadInputError:
        raise
    except Exception as error:  # a damaged file may raise anything, even SyntaxError
        raise BadInputError(f"{path.name} is no image that can be read. Send it again, whole.") from error
    if len(expected.sizes) == 2:
        return pixels
    return pixels.transpose(2, 0, 1) if mode == "RGB" else pixels[None]


def _mode(path: Path, expected: ExpectedInput) -> str:
    """Pillow's mode of the images that the model takes. A model that was not trained on plain pixels takes none."""
    sizes = expected.sizes
    mode = None if sizes is None else {2: "L", 3: {1: "L", 3: "RGB"}.get(sizes[0] or 0)}.get(len(sizes))
    if mode is None or expected.dtype is not torch.uint8:
        kind = str(expected.dtype).removeprefix("torch.")
        raise BadInputError(
            f"{path.name} is an image, but the model takes {kind} numbers of shape {expected.shape}, and the file of "
            "the model does not tell how pixels become these. Send .npy files."
        )
    return mode


def _check_size(path: Path, size: tuple[int, int], wanted: Sequence[int | None]) -> None:
    if any(have != want and want is not None for have, want in zip(size, wanted, strict=True)):
        raise BadInputError(
            f"{path.name} has {size[0]} x {size[1]} pixels (height x width), but the model takes "
            f"{wanted[0] or 'any'} x {wanted[1] or 'any'}. Resize it as the training did."
        )
    if size[0] * size[1] > MAX_PIXELS:
        raise BadInputError(
            f"{path.name} has {size[0]} x {size[1]} pixels, and at most {MAX_PIXELS:,} are decoded. Make it smaller."
        )
