"""Parts of tensors: those of safetensors itself, and no more of the file than their rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from azureml_strategy.huggingface.loading import open_slices

TENSORS = {
    "matrix": torch.randn(6, 4),
    "half": torch.randn(5, 2, 3).to(torch.bfloat16),
    "whole_numbers": torch.arange(7),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
}
PARTS: list[tuple[str, Any]] = [
    ("matrix", ...),
    ("matrix", slice(2, 4)),
    ("matrix", (slice(1, 6), slice(2, 4))),
    ("half", (slice(3, 5), slice(0, 2), slice(1, 2))),
    ("half", slice(2, 2)),
    ("whole_numbers", slice(3, None)),
    ("scalar", ...),
    ("empty", ...),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(("name", "index"), PARTS)
def test_a_part_is_that_of_the_tensor(file: Path, name: str, index: Any) -> None:
    with open_slices([file]) as slices, safe_open(file, "pt") as stock:
        assert slices.keys() == TENSORS.keys()
        part, theirs = slices[name], stock.get_slice(name)
        assert (part.get_shape(), part.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
        expected = TENSORS[name][index]
        assert part[index].dtype == expected.dtype
        assert torch.equal(part[index], expected)
        assert part[index].is_contiguous()


def test_no_more_is_read_than_the_rows(tmp_path: Path) -> None:
    save_file({"large": torch.zeros(1024, 256)}, tmp_path / "large")
    with open_slices([tmp_path / "large"]) as slices:
        before = bytes_read()
        slices["large"][256:512]
        assert 2**18 <= bytes_read() - before < 2**18 + 2**12


def test_a_file_that_is_cut_off_is_an_error(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)
    with open_slices([file]) as slices:
        last = max(slices.values(), key=lambda each: each._offset + len(each.get_shape()))
        with pytest.raises(OSError, match="The file ends 8 bytes before its tensor does"):
            last[...]


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])
