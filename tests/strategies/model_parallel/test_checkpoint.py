from __future__ import annotations

import io
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import model_parallel
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from azureml_strategy.checkpoint.formats import CheckpointFormatError, load_sharded, read_index
from azureml_strategy.strategies.model_parallel.checkpoint import (
    check_checkpoint,
    copy_batch,
    copy_from_rank_zero,
    in_plain_types,
    reading,
    warn_of_unloadable,
)
from azureml_strategy.strategies.model_parallel.gradients import uncut_parameters
from azureml_strategy.strategies.model_parallel.plan import cut_tensors, is_parallel, shard_parameters


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(states)))

    training_step = validation_step = test_step = predict_step = forward


def test_what_a_plan_leaves_whole(mesh: DeviceMesh) -> None:
    network = Network()
    assert not is_parallel(network)
    cut_tensors(network, mesh["tensor_parallel"], {"up": "colwise", "down": "rowwise"})
    shard_parameters(network, mesh["data_parallel"], [], "32-true")
    assert is_parallel(network)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    uncut = [names[id(parameter)] for parameter in uncut_parameters(network, "tensor_parallel")]
    assert uncut == ["norm.weight", "norm.bias", "down.bias"]


def test_tensors_without_values_are_left_alone(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        network = Network()
    copy_from_rank_zero(network, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in network.parameters())


def test_a_batch_keeps_its_form(mesh: DeviceMesh) -> None:
    turned = torch.arange(6).view(2, 3).t()  # not contiguous, as gloo needs it
    batch = {"tokens": turned, "names": ["a", "b"], "pair": (torch.ones(1), 2)}
    copied = copy_batch(batch, mesh["tensor_parallel"].get_group())
    assert torch.equal(copied["tokens"], turned)
    assert (copied["names"], copied["pair"][1]) == (["a", "b"], 2)


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


ran: list[str] = []


class Evil:
    """A pickle that calls what its writer has chosen."""

    def __reduce__(self) -> Any:
        return ran.append, ("code",)


@pytest.mark.parametrize("place", ["index", "part of the index", "value"])
def test_a_folder_runs_no_code(place: str, folder: Path) -> None:
    """Neither when it is looked at, nor when Lightning loads it."""
    ran.clear()
    if place == "value":
        save({"state_dict": {"extra": io.BytesIO(b"")}, "optimizer": {"lr": Evil()}}, checkpoint_id=folder)
    else:
        index = pickle.loads((folder / ".metadata").read_bytes())
        index.planner_data = Evil()
        (folder / ".metadata").write_bytes(pickle.dumps(Evil() if place == "index" else index))
        with pytest.raises(CheckpointFormatError, match=r"builtins\.getattr.*run code.*weights_only=False"):
            check_checkpoint(folder, SHAPES, strict=False)
    state: Any = {"optimizer": {"lr": 0.1}} if place == "value" else {"state_dict": {"weight": torch.zeros(2, 3)}}
    with reading(None), pytest.raises(CheckpointFormatError, match="a part cannot be read"):
        model_parallel._distributed_checkpoint_load(state, folder)
    assert ran == []


def test_values_of_an_optimizer_are_read(tmp_path: Path) -> None:
    values = {"lr": np.float64(0.5), "betas": (0.9, 0.95), "steps": np.int64(3), "weight": torch.ones(2)}
    save({"optimizer": dict(values)}, checkpoint_id=tmp_path)
    state = {"optimizer": {**dict.fromkeys(values, 0), "betas": (0, 0), "weight": torch.zeros(2)}}
    load_sharded(state, tmp_path)
    assert {**state["optimizer"], "weight": None} == {**values, "weight": None}
    assert type(state["optimizer"]["lr"]) is np.float64
    assert torch.equal(state["optimizer"]["weight"], torch.ones(2))


def test_what_a_restart_will_not_read_is_told_when_it_is_written(tmp_path: Path) -> None:
    kept = {"lr": np.float64(0.5), "betas": OmegaConf.create([0.9, 0.95]), "weight": torch.ones(2)}
    written = in_plain_types({"groups": [kept]})
    assert written["groups"][0]["betas"] == [0.9, 0.95]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unloadable({"optimizer_0": written, "state_dict": OrderedDict(weight=torch.ones(2))})
    save({"optimizer": written}, checkpoint_id=tmp_path)
    load_sharded({"optimizer": in_plain_types({"groups": [dict(kept)]})}, tmp_path)
    with pytest.warns(
        UserWarning, match=r"optimizer_0 → groups → 0 → rule in the checkpoint is a pathlib.*weights_only=False"
    ):
        warn_of_unloadable({"optimizer_0": {"groups": [{"rule": tmp_path}]}})


def test_what_the_user_has_registered_stays_registered(tmp_path: Path) -> None:
    save({"lr": np.float64(0.5)}, checkpoint_id=tmp_path)
    with torch.serialization.safe_globals([np.dtype]):
        load_sharded({"lr": 0}, tmp_path)
        assert np.dtype in torch.serialization.get_safe_globals()


def _changed(index: Any, what: str) -> Any:
    first, stored = next(iter(index.state_dict_metadata)), next(iter(index.storage_data.values()))
    if what == "another type":
        return {"state_dict_metadata": {}}
    if what == "huge":
        index.state_dict_metadata[first].size = torch.Size((2**40, 3))
    if what == "entry":
        index.state_dict_metadata[first] = torch.Size((1,))
    if what in ("../a", "/a", "a/../../b", "a\0b", "a" * 300):
        stored.relative_path = what
    return index


@pytest.mark.parametrize("what", ["another type", "huge", "entry", "../a", "/a", "a/../../b", "a\0b", "a" * 300])
def test_an_index_is_damaged(what: str, folder: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(_changed(index, what)))
    with pytest.raises(CheckpointFormatError, match=r"\.metadata (is damaged|asks for)"):
        read_index(folder)
