"""Consolidation of what one process can write; tests/multiprocess/test_zero.py consolidates ZeRO's shards."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.zero.config import ZeroStageEnum
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from azureml_strategy.checkpoint.consolidate import checkpoint_format, consolidate
from azureml_strategy.checkpoint.formats import ZERO, CheckpointFormatError
from azureml_strategy.checkpoint.module_rebuild import make_module
from azureml_strategy.checkpoint.serialization import PlainDataStrategy, to_plain
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


class Plain(PlainDataStrategy, SingleDeviceStrategy):
    """What each of our strategies adds to a checkpoint, on one device."""


class Vocabulary(Linear):
    """Keeps something beside its weights, as docs/checkpoints.md says."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.words: list[Path] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["words"] = [Path("a"), Path("b")]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.words = checkpoint["words"]


def test_what_a_hook_of_the_module_has_added_is_kept(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, barebones=True, strategy=Plain("cpu"))
    trainer.strategy.connect(Vocabulary(3))
    trainer.save_checkpoint(tmp_path / "pickled.ckpt")
    torch.save(to_plain(torch.load(tmp_path / "pickled.ckpt", weights_only=False)), tmp_path / "whole.ckpt")
    consolidate(tmp_path / "whole.ckpt", tmp_path / "weights.ckpt")
    content = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    made = make_module(content)
    assert isinstance(made, Vocabulary)
    assert made.words == [Path("a"), Path("b")]


class Odd:
    """Has no plain form: a restart would have to run its code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Odd, ()


def test_what_has_no_plain_form_is_told(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "extra": Odd()}, tmp_path / "odd.ckpt")
    with pytest.raises(CheckpointFormatError, match=r"odd\.ckpt holds what a file of plain values cannot.* extra is"):
        consolidate(tmp_path / "odd.ckpt", tmp_path / "weights.ckpt", trust_pickles=True)


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
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._folder,)


def in_a_single_file(path: Path, trap: Trap) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": trap}, path)


def in_meta(path: Path, trap: Trap) -> None:
    torch.save({"hyper_parameters": trap}, distributed(path, {"weight": torch.zeros(2)}) / "meta.pt")


def in_an_index(path: Path, trap: Trap) -> None:
    index = dcp.FileSystemReader(distributed(path, {"weight": torch.zeros(2)})).read_metadata()
    index.planner_data = trap
    (path / ".metadata").write_bytes(pickle.dumps(index))


def in_a_shard(path: Path, trap: Trap) -> None:
    """Of torch's, which reads tensors only, trusted or not."""
    distributed(path, {"weight": torch.zeros(2)})
    index = dcp.FileSystemReader(path).read_metadata()
    (shard,) = path.glob("*.distcp")
    torch.save(trap, shard)
    for info in index.storage_data.values():
        info.offset, info.length = 0, shard.stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(index))


def of_deepspeed(path: Path, files: dict[str, Any]) -> None:
    """A folder as DeepSpeed names its files, with what lies in them."""
    (path / "checkpoint").mkdir(parents=True)
    (path / "latest").write_text("checkpoint")
    for name, content in files.items():
        torch.save(content, path / "checkpoint" / name)


def in_the_module_of_zero(path: Path, trap: Trap) -> None:
    of_deepspeed(path, {ZERO_OPTIMIZER: {}, "mp_rank_00_model_states.pt": {"module": {}, "hyper_parameters": trap}})


def in_the_optimizer_of_zero(path: Path, trap: Trap) -> None:
    module = {"module": {}, "buffer_names": [], "param_shapes": [], "shared_params": {}}
    of_deepspeed(path, {ZERO_OPTIMIZER: {"optimizer_state_dict": trap}, "mp_rank_00_model_states.pt": module})


def in_the_module_of_a_pipeline(path: Path, trap: Trap) -> None:
    of_deepspeed(path, {"mp_rank_00_model_states.pt": {"hyper_parameters": trap}})
    (path / "pipeline.json").write_text(json.dumps({"places": []}))


def in_a_layer_of_a_pipeline(path: Path, trap: Trap) -> None:
    of_deepspeed(path, {"mp_rank_00_model_states.pt": {}, "layer_00-model_states.pt": {"weight": trap}})
    (path / "pipeline.json").write_text(json.dumps({"places": ["layer"]}))


ZERO_OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
TRAPS = (
    *(in_a_single_file, in_meta, in_an_index, in_a_shard, in_the_module_of_zero, in_the_optimizer_of_zero),
    *(in_the_module_of_a_pipeline, in_a_layer_of_a_pipeline),
)


@pytest.mark.parametrize("lay", TRAPS)
def test_code_of_a_checkpoint_is_not_run(
    lay: Callable[[Path, Trap], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lay(tmp_path / "theirs.ckpt", Trap(tmp_path / "sprung"))
    command = ["consolidate", str(tmp_path / "theirs.ckpt"), str(tmp_path / "weights.ckpt")]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "posix.mkdir" in message
    assert ("--trust-pickles" in message) == (lay is not in_a_shard)
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "weights.ckpt").exists()
    with suppress(Exception, dcp.CheckpointException):  # what lies in these folders is no model
        consolidate(tmp_path / "theirs.ckpt", tmp_path / "weights.ckpt", trust_pickles=True)
    assert (tmp_path / "sprung").exists() == (lay is not in_a_shard)


def test_what_other_threads_load_meanwhile_is_loaded_as_they_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's tool would run the code of pickles. Nobody else's loading changes while it is kept from that."""
    write_zero(tmp_path / "run")
    torch.save({"spacing": Fraction(1, 3)}, tmp_path / "mine.pt")
    load, read = torch.load, list[Any]()

    def load_of_another_thread() -> None:
        read.append(load(tmp_path / "mine.pt", weights_only=False)["spacing"])
        try:
            load(tmp_path / "mine.pt", weights_only=True)
        except pickle.UnpicklingError:
            read.append("refused")

    def load_and_meanwhile(*arguments: Any, **named: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            other.submit(load_of_another_thread).result()
        return load(*arguments, **named)

    monkeypatch.setattr(torch, "load", load_and_meanwhile)
    before = dict(os.environ)
    weights = ZERO.read(tmp_path / "run")["state_dict"]
    assert {name: each.tolist() for name, each in weights.items()} == {"weight": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]}
    assert len(read) >= 6, "Lightning's entries, and those of DeepSpeed's tool"
    assert set(read) == {Fraction(1, 3), "refused"}
    assert dict(os.environ) == before
    assert "_Inert" not in str(torch.serialization.get_safe_globals())


def write_zero(path: Path) -> None:
    """A checkpoint of one process under ZeRO-2: six float32 numbers, and a learning rate that numpy has computed."""
    module = {
        "module": {"weight": torch.zeros(2, 3, dtype=torch.bfloat16)},
        "buffer_names": [],
        "param_shapes": [{"weight": torch.Size([2, 3])}],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "ds_version": "0.19.0",
        "lr": np.float64(0.1),
    }
    optimizer = {
        "zero_stage": ZeroStageEnum.gradients,
        "partition_count": 1,
        "single_partition_of_fp32_groups": [torch.arange(6.0)],
    }
    of_deepspeed(path, {ZERO_OPTIMIZER: {"optimizer_state_dict": optimizer}, "mp_rank_00_model_states.pt": module})
