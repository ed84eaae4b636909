"""What `consolidate` would leave out of a checkpoint is kept, named or refused, whatever the layout."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from azureml_strategy.checkpoint.consolidate import consolidate
from azureml_strategy.checkpoint.exports import write_safetensors
from azureml_strategy.checkpoint.formats import CheckpointFormatError
from azureml_strategy.checkpoint.serialization import to_plain

WEIGHTS = {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)}
MEMBERS = {"count": 3, "running": torch.arange(2.0), "parts": [1, "two", torch.ones(1)]}


def single(path: Path, weights: dict[str, Any], **others: Any) -> Path:
    torch.save({"state_dict": weights, **others}, path)
    return path


def sharded(path: Path, weights: dict[str, Any], **others: Any) -> Path:
    """As Lightning's ModelParallelStrategy writes it."""
    content = {"state_dict": weights, "optimizer_0": {"state": {"layer.weight": torch.ones(2, 3)}}}
    dcp.save(content, checkpoint_id=path, no_dist=True)
    torch.save(others, path / "meta.pt")
    return path


LAYOUTS: dict[str, Callable[..., Path]] = {"single": single, "sharded": sharded}
# What a state dict may hold beside weights: modules give it by get_extra_state.
EXTRA: dict[str, Any] = {"number": 3.0, "text": "on", "tensor": torch.ones(2), "members": MEMBERS, "nothing": None}
# Entries of hooks, by names that files of DeepSpeed use as well.
ADDED = ("words", "module", "optimizer", "data_sampler", "global_samples", "param_shapes")


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_no_weight_is_kept(tmp_path: Path, layout: str) -> None:
    weights = {**WEIGHTS, **{f"{name}._extra_state": value for name, value in EXTRA.items()}}
    added = {name: number for number, name in enumerate(ADDED)}
    made = LAYOUTS[layout](tmp_path / "a", weights, **added)
    consolidate(made, tmp_path / "whole.ckpt")
    content = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert equal(content["state_dict"], weights)
    assert {name: content.get(name) for name in ADDED} == added


class Odd:
    """Reading it runs code."""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"net": WEIGHTS, "optimizer_0": WEIGHTS}, "holds net, optimizer_0, and no weights under `model`"),
        (WEIGHTS, "holds layer, and no weights"),
        ({"model": WEIGHTS, "state_dict": WEIGHTS}, "holds weights under both of `model` and `state_dict`"),
        ({"model": {**WEIGHTS, "x._extra_state": Odd()}}, "a part cannot be read, and no part may be left out"),
    ],
)
def test_shards_whose_weights_are_not_all_found(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    dcp.save(content, checkpoint_id=tmp_path / "a", no_dist=True)
    torch.save({}, tmp_path / "a" / "meta.pt")
    with pytest.raises(CheckpointFormatError, match=re.escape(words)):
        consolidate(tmp_path / "a", tmp_path / "whole.ckpt")
    assert not (tmp_path / "whole.ckpt").exists()


def test_shards_without_what_lies_beside_them(tmp_path: Path) -> None:
    made = sharded(tmp_path / "a", WEIGHTS)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*left out")
        consolidate(made, tmp_path / "whole.ckpt")
    (made / "meta.pt").unlink()
    with pytest.warns(UserWarning, match=r"a has no meta\.pt, .* hyperparameters and what hooks .* are left out"):
        consolidate(made, tmp_path / "weights.ckpt")


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"hyper_parameters": {"width": 3}, "epoch": 1}, None),
        ({"hyper_parameters": {"width": 3, "scales": torch.ones(1)}}, "hyper_parameters → scales"),
        ({"hyper_parameters": {"width": 3, "root": Path("a")}}, "hyper_parameters → root"),
        ({"words": ["a"]}, "words"),
        ({"words": Path("a"), "hyper_parameters": {"f": torch.relu}}, "hyper_parameters → f"),
    ],
)
def test_what_metadata_of_safetensors_do_not_hold(tmp_path: Path, others: dict[str, Any], named: str | None) -> None:
    torch.save(to_plain({"state_dict": WEIGHTS, **others}), tmp_path / "a.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        write_safetensors(tmp_path / "a.ckpt", tmp_path / "a.safetensors")
    said = [str(each.message) for each in caught if "left out" in str(each.message)]
    assert len(said) == (named is not None)
    assert named is None or named in said[0], said


def _zero(path: Path) -> Path:
    """A ZeRO-1 checkpoint of two ranks with one weight."""
    (path / "checkpoint").mkdir(parents=True)
    (path / "latest").write_text("checkpoint")
    module = {"weight": torch.ones(2), "_extra_state": MEMBERS, "norm._extra_state": torch.ones(1)}
    shapes = [{"weight": torch.Size([2])}]
    model = {"buffer_names": [], "param_shapes": shapes, "shared_params": {}, "module": module}
    torch.save(model, path / "checkpoint" / "mp_rank_00_model_states.pt")
    for rank in range(2):
        states = {"zero_stage": 1, "partition_count": 2, "single_partition_of_fp32_groups": [torch.ones(1)]}
        file = path / "checkpoint" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": states}, file)
    return path


def test_shards_of_zero_keep_extra_states(tmp_path: Path) -> None:
    weights = consolidate(_zero(tmp_path / "zero"), tmp_path / "whole.ckpt")
    assert list(weights) == ["weight", "norm._extra_state"]
    expected = {"weight": torch.ones(2), "_extra_state": MEMBERS, "norm._extra_state": torch.ones(1)}
    assert equal(torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"], expected)


@pytest.mark.parametrize("lost", ["zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"])
def test_a_file_of_a_rank_is_missing(tmp_path: Path, lost: str) -> None:
    made = _zero(tmp_path / "zero")
    (made / "checkpoint" / lost).unlink()
    with pytest.raises(CheckpointFormatError, match="a part cannot be read, and no part may be left out: "):
        consolidate(made, tmp_path / "whole.ckpt")


def test_a_pipeline_without_the_file_of_its_first_stage(tmp_path: Path) -> None:
    (tmp_path / "pipeline.json").write_text('{"places": []}')
    shutil.copytree(_zero(tmp_path / "zero") / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointFormatError, match=r"left out: there is no checkpoint/mp_rank_00_model_states\.pt"):
        consolidate(tmp_path, tmp_path / "whole.ckpt")
