"""Read samples from a request or a file, and refuse what a model was not trained on with one sentence."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from azureml_strategy.data.pillow_images import to_mode

Numbers = npt.NDArray[Any]
IMAGES = (".png", ".jpg", ".jpeg", ".bmp")
"""Files that hold one sample each, as pixels."""
MAX_BYTES = 16 * 2**20
"""The largest body of a request. Our choice, some times what Azure ML itself lets through."""
MAX_NUMBERS = 2**22
"""The most numbers in an answer. Our choice: as JSON they take some 80 MB, and as Python's floats twice that."""
_NPY = b"\x93NUMPY"
_BY_NUMBERS = "the numbers of one sample after the other in nested lists"


class BadInputError(ValueError):
    """Input that the model cannot take. The message is for the client: what was seen, and what to send."""


@dataclass(frozen=True)
class ExpectedInput:
    """What one sample of a model's input is.

    Attributes:
        sizes: of one sample, without the dimension that counts samples. None for a size that may vary; None in place
            of all sizes if they are not known.
        dtype: of the numbers.
        max_samples: the most samples at a time.
    """

    sizes: tuple[int | None, ...] | None
    dtype: torch.dtype
    max_samples: int

    @classmethod
    def of(cls, record: Mapping[str, Any] | None, max_samples: int) -> ExpectedInput:
        """Read the input's record of a checkpoint; without one, samples of any sizes and of float32."""
        if record is None:
            return cls(None, torch.float32, max_samples)
        return cls(tuple(record["shape"]), getattr(torch, record["dtype"]), max_samples)

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
    """The type of numpy's that holds a type of torch's; it has no bfloat16."""
    return np.float32 if dtype is torch.bfloat16 else torch.empty(0, dtype=dtype).numpy().dtype


def read_body(body: bytes) -> Numbers:
    """Read the samples of a request: JSON `{"data": [...]}`, or the bytes of a `.npy` file.

    Raises:
        BadInputError: the body is empty or neither.
    """
    if not body:
        raise BadInputError('The request is empty. Send JSON, {"data": [SAMPLE, ...]}, or the bytes of a .npy file.')
    return _read_npy(body) if body.startswith(_NPY) else _read_json(body)


def read_file(path: Path, expected: ExpectedInput) -> Tensor:
    """Read the samples of a file: `.npy` or `.json` with one or more, or an image.

    Args:
        path: the file; its suffix says what it is.
        expected: what the model takes. An `.npy` file may hold one sample without the dimension that counts samples.

    Raises:
        BadInputError: the file is of another kind, cannot be read as what its name says, or does not fit the model.
    """
    suffix = path.suffix.lower()
    if suffix in IMAGES:
        return expected.checked(_read_image(path, expected)[None])
    if suffix not in (".npy", ".json"):
        raise BadInputError(f"{path.name} is no file of samples. Send .npy, .json or {', '.join(IMAGES)}.")
    numbers = read_body(path.read_bytes())
    one = expected.sizes is not None and numbers.ndim == len(expected.sizes)
    return expected.checked(numbers[None] if one else numbers)


def _read_json(body: bytes) -> Numbers:
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
    return _nested(content["data"])


def _refuse_constant(name: str) -> Any:
    raise BadInputError(f"The samples hold {name}. Send finite numbers only.")


def _nested(data: Any) -> Numbers:
    if not isinstance(data, list):
        raise BadInputError(f'"data" is a {type(data).__name__}, but must be a list of samples: {_BY_NUMBERS}.')
    try:
        return np.asarray(data)
    except (ValueError, OverflowError) as error:  # lists of unequal lengths, or too deep
        raise BadInputError(
            "The samples are no regular array: lists side by side have unequal lengths. Send samples of one shape."
        ) from error


def _read_npy(body: bytes) -> Numbers:
    """Read an array without numpy's pickles, and without memory for a size that only the header claims."""
    stream = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(stream)
    except Exception as error:  # numpy parses it as Python, which may raise anything
        raise BadInputError("The .npy file has a damaged header. Write it with numpy.save.") from error
    content = body[stream.tell() :]
    if dtype.kind not in "iuf":
        raise BadInputError(f"The .npy file holds {dtype}, and no numbers. Send an array of numbers.")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(content):
        raise BadInputError("The .npy file is longer or shorter than its header says. Write it with numpy.save.")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _read_image(path: Path, expected: ExpectedInput) -> Numbers:
    from PIL import Image

    mode = _mode(path, expected)
    assert expected.sizes is not None
    try:
        with Image.open(path) as image:
            _check_size(path, (image.height, image.width), expected.sizes[-2:])
            pixels = np.asarray(to_mode(image, mode))  # as the training read it
    except BadInputError:
        raise
    except Exception as error:  # a damaged file may raise anything, even SyntaxError
        raise BadInputError(f"{path.name} is no image that can be read. Send it again, whole.") from error
    if len(expected.sizes) == 2:
        return pixels
    return pixels.transpose(2, 0, 1) if mode == "RGB" else pixels[None]


def _mode(path: Path, expected: ExpectedInput) -> str:
    """The colours that the model takes; an error for one that was not trained on pixels as they are."""
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
