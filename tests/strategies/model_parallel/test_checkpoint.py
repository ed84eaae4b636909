from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import save

from azureml_strategy.strategies.model_parallel.checkpoint import check_checkpoint

SHAPES = {"weight": torch.Size((2, 3)), "bias": torch.Size((2,))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    save({"state_dict": state}, checkpoint_id=tmp_path / "last.ckpt")
    torch.save({"epoch": 1}, tmp_path / "last.ckpt" / "meta.pt")
    return tmp_path / "last.ckpt"


def test_one_that_fits(folder: Path, tmp_path: Path) -> None:
    check_checkpoint(folder, SHAPES, strict=True)
    check_checkpoint(folder, {**SHAPES, "more": torch.Size((1,))}, strict=False)
    (tmp_path / "one.ckpt").touch()  # torch reads single files by itself
    check_checkpoint(tmp_path / "one.ckpt", SHAPES, strict=True)


def test_another_model(folder: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("has no layer.weight (1 of 3 weights of this model are missing)")):
        check_checkpoint(folder, {**SHAPES, "layer.weight": torch.Size((1,))}, strict=True)
    with pytest.raises(ValueError, match=re.escape("weight is (4, 3), but (2, 3) in the checkpoint")):
        check_checkpoint(folder, {**SHAPES, "weight": torch.Size((4, 3))}, strict=False)


def test_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no checkpoint at"):
        check_checkpoint(tmp_path / "typo.ckpt", SHAPES, strict=True)


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_half_written(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"is incomplete: {re.escape(name)} is missing"):
        check_checkpoint(folder, SHAPES, strict=True)


def test_another_layout(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("checkpoint")
    (tmp_path / "zero_to_fp32.py").touch()
    with pytest.raises(ValueError, match=r"it holds latest, zero_to_fp32.py, but no .metadata"):
        check_checkpoint(tmp_path, SHAPES, strict=True)
