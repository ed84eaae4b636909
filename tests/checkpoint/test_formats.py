"""Layers in files of their own, as one set of weights. Real ones are read in tests/multiprocess/test_pipeline.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from azureml_strategy.checkpoint.formats import PIPELINE, CheckpointFormatError, consolidate_pipeline


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "pipeline.json").write_text(json.dumps({"places": ["network.first", None, "network.last"]}))
    for index, value in ((0, 1.0), (2, 3.0)):
        torch.save({"weight": torch.tensor(value)}, tmp_path / "checkpoint" / f"layer_{index:02d}-model_states.pt")
    torch.save({"epoch": 4, "module": None}, tmp_path / "checkpoint" / "mp_rank_00_model_states.pt")
    return tmp_path


def test_the_names_are_those_of_the_whole_module(folder: Path) -> None:
    assert consolidate_pipeline(folder) == {"network.first.weight": 1.0, "network.last.weight": 3.0}


def test_what_lightning_saved_lies_beside_the_weights(folder: Path) -> None:
    assert PIPELINE.found(folder)
    assert not PIPELINE.found(folder / "checkpoint")
    read = PIPELINE.read(folder)
    assert read["epoch"] == 4
    assert read["state_dict"].keys() == {"network.first.weight", "network.last.weight"}


def test_a_missing_layer_is_named(folder: Path) -> None:
    (folder / "checkpoint" / "layer_02-model_states.pt").unlink()
    with pytest.raises(CheckpointFormatError, match=r"lacks checkpoint/layer_02-model_states\.pt"):
        consolidate_pipeline(folder)
