"""Consolidation of what one process can write; tests/multiprocess/test_zero.py consolidates ZeRO's shards."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from azureml_strategy.checkpoint.consolidate import checkpoint_format, consolidate
from azureml_strategy.checkpoint.formats import CheckpointFormatError
from azureml_strategy.checkpoint.plain_data import saved_hyperparameters
from azureml_strategy.cli import main


class Linear(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


@pytest.fixture
def single_file(tmp_path: Path) -> Path:
    trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
    trainer.strategy.connect(Linear(3))
    trainer.save_checkpoint(tmp_path / "single.ckpt")
    return tmp_path / "single.ckpt"


def distributed(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """As Lightning's ModelParallelStrategy writes it: the weights under `model`, the rest in a file of its own."""
    dcp.save({"model": weights}, checkpoint_id=folder, no_dist=True)
    torch.save({"epoch": 3, "pytorch-lightning_version": "2.6.6", "hyper_parameters": {"width": 3}}, folder / "meta.pt")
    return folder


def test_a_single_file_loses_all_but_its_weights(single_file: Path, tmp_path: Path) -> None:
    before = torch.load(single_file, weights_only=False)
    weights = consolidate(single_file, tmp_path / "new" / "weights.ckpt")
    after = torch.load(tmp_path / "new" / "weights.ckpt", weights_only=True)
    assert torch.equal(after["state_dict"]["layer.weight"], before["state_dict"]["layer.weight"])
    assert weights.keys() == after["state_dict"].keys()
    assert "loops" in before
    assert not {"loops", "optimizer_states", "callbacks"} & after.keys()
    assert Linear.load_from_checkpoint(tmp_path / "new" / "weights.ckpt").layer.in_features == 3


def test_shards_of_torch(tmp_path: Path) -> None:
    expected = Linear(3)
    folder = distributed(tmp_path / "sharded.ckpt", expected.state_dict())
    consolidate(folder, tmp_path / "weights.ckpt")
    read = Linear.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert torch.equal(read.layer.weight, expected.layer.weight)
    assert torch.load(tmp_path / "weights.ckpt", weights_only=True)["epoch"] == 3


def test_the_command(single_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "weights.ckpt")
    assert main(["consolidate", str(single_file), output]) == 0
    assert capsys.readouterr().out == f"{output}: 2 tensors, 4 numbers\n"
    assert main(["consolidate", str(single_file), output]) == 2
    assert "weights.ckpt exists. Name a file that does not" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".part"] == []


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match=r"There is no .*gone\.ckpt"):
        checkpoint_format(tmp_path / "gone.ckpt")
    with pytest.raises(CheckpointFormatError, match=r"is a folder, but no checkpoint .* DeepSpeed ZeRO shards"):
        checkpoint_format(tmp_path)
    (tmp_path / "latest").write_text("checkpoint")
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(CheckpointFormatError, match=f"is a part of a DeepSpeed checkpoint. Give {tmp_path}"):
        checkpoint_format(tmp_path / "checkpoint")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointFormatError, match="holds no `state_dict`"):
        consolidate(tmp_path / "other.pt", tmp_path / "weights.ckpt")


def test_slices_of_tensor_parallelism_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("checkpoint")
    (tmp_path / "checkpoint").mkdir()
    for name in (
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "mp_rank_00_model_states.pt",
        "mp_rank_01_model_states.pt",
    ):
        (tmp_path / "checkpoint" / name).touch()
    with pytest.raises(CheckpointFormatError, match=r"was saved with tensor_parallel_size above 1.*train with .*=1"):
        consolidate(tmp_path, tmp_path / "weights.ckpt")


class Trap:
    """What somebody else has put into a checkpoint: whoever unpickles it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def trap_in_a_single_file(folder: Path, trap: Trap) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "callbacks": {"Trap": trap}}, folder / "checkpoint.ckpt")


def trap_beside_shards(folder: Path, trap: Trap) -> None:
    distributed(folder / "checkpoint.ckpt", {"a": torch.ones(1)})
    torch.save({"trap": trap}, folder / "checkpoint.ckpt" / "meta.pt")


def trap_in_an_index(folder: Path, trap: Trap) -> None:
    distributed(folder / "checkpoint.ckpt", {"a": torch.ones(1)})
    (folder / "checkpoint.ckpt" / ".metadata").write_bytes(pickle.dumps(trap))


def trap_in_a_shard(folder: Path, trap: Trap) -> None:
    zero_folder(folder, {"buffer_names": []}, {"optimizer_state_dict": trap})


def trap_beside_zero_shards(folder: Path, trap: Trap) -> None:
    zero_folder(folder, {"buffer_names": [], "trap": trap}, {"optimizer_state_dict": {}})


def trap_in_a_stage(folder: Path, trap: Trap) -> None:
    shards = pipeline_folder(folder)
    torch.save({"trap": trap}, shards / "mp_rank_00_model_states.pt")


def trap_in_a_layer(folder: Path, trap: Trap) -> None:
    shards = pipeline_folder(folder)
    torch.save({"weight": trap}, shards / "layer_00-model_states.pt")


def zero_folder(folder: Path, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    shards = folder / "checkpoint.ckpt" / "checkpoint"
    shards.mkdir(parents=True)
    (shards.parent / "latest").write_text("checkpoint")
    torch.save(model, shards / "mp_rank_00_model_states.pt")
    torch.save(optimizer, shards / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def pipeline_folder(folder: Path) -> Path:
    shards = folder / "checkpoint.ckpt" / "checkpoint"
    shards.mkdir(parents=True)
    (shards.parent / "pipeline.json").write_text(json.dumps({"places": ["layer"]}))
    torch.save({"epoch": 3}, shards / "mp_rank_00_model_states.pt")
    torch.save({"weight": torch.ones(1)}, shards / "layer_00-model_states.pt")
    return shards


PLACES = [
    trap_in_a_single_file,
    trap_beside_shards,
    trap_in_an_index,
    trap_in_a_shard,
    trap_beside_zero_shards,
    trap_in_a_stage,
    trap_in_a_layer,
]


@pytest.mark.parametrize("place", PLACES)
def test_what_would_run_is_refused(place: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = tmp_path / "ran"
    place(tmp_path, Trap(ran))
    names = [str(tmp_path / "checkpoint.ckpt"), str(tmp_path / "weights.ckpt")]
    assert main(["consolidate", *names]) == 2
    said = capsys.readouterr().err
    assert "asks for " in said
    assert "open" in said
    assert "type --trust-pickles" in said
    assert not ran.exists()
    assert not (tmp_path / "weights.ckpt").exists()
    with suppress(Exception):  # what the trap leaves is no checkpoint
        main(["consolidate", *names, "--trust-pickles"])
    assert ran.exists() == (place is not trap_in_a_layer), "layers are tensors only, whoever wrote them"


def test_code_of_deepspeed_does_not_run_either(tmp_path: Path) -> None:
    """Its objects become empty ones, and so do numpy's: their modules have functions that run what they are given."""
    ran = tmp_path / "ran"

    class Runs(Trap):
        def __reduce__(self) -> Any:
            return np.testing._private.utils.runstring, (f"open({str(self.file)!r}, 'w')", {})

    zero_folder(tmp_path, {"buffer_names": [], "trap": Runs(ran)}, {"optimizer_state_dict": {}})
    with pytest.raises(Exception, match=r"\w"):
        consolidate(tmp_path / "checkpoint.ckpt", tmp_path / "weights.ckpt")
    assert not ran.exists()
    with pytest.raises(Exception, match=r"\w"):
        consolidate(tmp_path / "checkpoint.ckpt", tmp_path / "weights.ckpt", trust_pickles=True)
    assert ran.exists()


def test_hyperparameters_of_an_older_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it holds as a pickle is in plain form afterwards."""
    hyperparameters = {"width": 3, "root": Path("/data")}
    torch.save(
        {"state_dict": Linear(3).state_dict(), "hyper_parameters": hyperparameters, "callbacks": {"a": Path("/b")}},
        tmp_path / "old.ckpt",
    )
    assert main(["consolidate", str(tmp_path / "old.ckpt"), str(tmp_path / "weights.ckpt"), "--trust-pickles"]) == 0
    assert "Not in reach of load_from_checkpoint by itself: root. Type" in capsys.readouterr().out
    assert torch.load(tmp_path / "weights.ckpt", weights_only=True)["hyper_parameters"] == {"width": 3}
    assert saved_hyperparameters(tmp_path / "weights.ckpt") == hyperparameters
    assert Linear.load_from_checkpoint(tmp_path / "weights.ckpt").layer.in_features == 3
