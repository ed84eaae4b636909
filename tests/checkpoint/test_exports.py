"""Weights for other programs: safetensors bit for bit, and ONNX models beside torch's own forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.consolidate import consolidate
from azureml_strategy.checkpoint.module_rebuild import make_module
from azureml_strategy.checkpoint.module_record import MODULE
from azureml_strategy.checkpoint.serialization import PlainDataStrategy
from azureml_strategy.cli import main


class Net(LightningModule):
    """Image to two numbers, with tied weights, a buffer, and a forward that the batch size does not matter to."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width * width, width * width)
        self.tied = nn.Linear(width * width, width * width, bias=False)
        self.tied.weight = self.layer.weight
        self.norm = nn.BatchNorm1d(width * width)
        self.head = nn.Linear(width * width, 2)

    def forward(self, images: Tensor) -> Tensor:
        rows: Tensor = self.head(torch.relu(self.norm(self.tied(self.layer(images.flatten(1) / 255)))))
        return rows

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Undecided(Net):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) if images.float().mean() > 0 else images.float()


def trained(module: LightningModule, folder: Path, dtype: torch.dtype = torch.uint8, **settings: Any) -> Path:
    """The checkpoint of two steps on images of 1 x 3 x 3."""
    images = torch.randint(0, 255, (8, 1, 3, 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    callbacks = settings.pop("callbacks", [JobCheckpoint(folder)])
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=folder,
        **settings,
    )
    trainer.fit(module, DataLoader(TensorDataset(images), 4))
    (path,) = folder.rglob("*.ckpt")
    return path


def content_of(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_safetensors_are_equal_bit_for_bit_and_tied_ones_are_there_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Net()
    path = trained(module, tmp_path)
    assert main(["consolidate", str(path), str(tmp_path / "w.safetensors"), "--format", "safetensors"]) == 0
    assert capsys.readouterr().out.endswith("w.safetensors: 10 tensors, 228 numbers\n")
    read = load_file(tmp_path / "w.safetensors")
    assert read.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert read[name].dtype == value.dtype
        assert read[name].numpy().tobytes() == value.numpy().tobytes(), name


def test_metadata_of_safetensors_are_texts(tmp_path: Path) -> None:
    path = trained(Net(), tmp_path)
    assert main(["consolidate", str(path), str(tmp_path / "w.safetensors"), "--format", "safetensors"]) == 0
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["epoch"], metadata["global_step"], metadata["format"]) == ("0", "2", "pt")
    assert json.loads(metadata["hyper_parameters"]) == {"width": 3}
    assert json.loads(metadata[MODULE])["input"] == {"shape": [1, 3, 3], "dtype": "uint8"}


def test_what_safetensors_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {"weight": torch.zeros(2), "extra_state": 3}}, tmp_path / "a.ckpt")
    assert main(["consolidate", str(tmp_path / "a.ckpt"), str(tmp_path / "a.st"), "--format", "safetensors"]) == 2
    assert "extra_state of the state dict is int, and safetensors holds tensors only." in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]


def test_an_onnx_model_computes_what_torch_computes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Net()
    path = trained(module, tmp_path)
    assert main(["consolidate", str(path), str(tmp_path / "m.onnx"), "--format", "onnx"]) == 0
    assert capsys.readouterr().out.endswith("m.onnx: input (N, 1, 3, 3), for any N\n")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    module.eval()
    for size in (1, 2, 3, 17):
        images = torch.randint(0, 255, (size, 1, 3, 3), dtype=torch.uint8)
        with torch.no_grad():
            expected = module(images).numpy()
        (computed,) = session.run(["output"], {"input": images.numpy()})
        assert computed.dtype == np.float32
        np.testing.assert_allclose(computed, expected, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_that_does_not_tell_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
    trainer.strategy.connect(Net())
    trainer.save_checkpoint(tmp_path / "old.ckpt")
    command = ["consolidate", str(tmp_path / "old.ckpt"), str(tmp_path / "m.onnx"), "--format", "onnx"]
    assert main(command) == 2
    assert "Consolidate or register the checkpoint again with --module-class" in capsys.readouterr().err
    command += ["--module-class", f"{Net.__module__}.Net"]
    assert main(command) == 2
    assert "neither the checkpoint nor example_input_array tells it. Type --input-shape" in capsys.readouterr().err
    assert main([*command, "--input-shape", "1,3,3"]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    assert session.get_inputs()[0].type == "tensor(float)"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--input-shape", "3,3"], "--input-shape is not for --format safetensors. Add --format lightning or"),
        (["--code", "."], "--code is not for --format safetensors. Add --format onnx, or leave it out."),
        (["--merge"], "--merge is not for --format safetensors. Add --format hf, or leave it out."),
    ],
)
def test_options_of_another_format(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["consolidate", "a.ckpt", "b", "--format", "safetensors", *options]) == 2
    assert words in capsys.readouterr().err


def test_wrong_sizes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained(Net(), tmp_path)
    output = str(tmp_path / "m.onnx")
    assert main(["consolidate", str(path), output, "--format", "onnx", "--input-shape", "1,5,5"]) == 2
    told = capsys.readouterr().err
    assert "torch cannot export the forward of Net for an input (N, 1, 5, 5) of float32" in told
    assert told.count("\n") == 1
    assert main(["consolidate", str(path), output, "--format", "onnx", "--input-dtype", "uint8"]) == 2
    assert "--input-dtype says nothing without --input-shape" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["consolidate", str(path), output, "--format", "onnx", "--input-shape", "3x32"])
    assert not Path(output).exists()


def test_a_forward_that_decides_by_values_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained(Undecided(), tmp_path)
    assert main(["consolidate", str(path), str(tmp_path / "m.onnx"), "--format", "onnx"]) == 2
    told = capsys.readouterr().err
    assert "torch cannot export the forward of Undecided" in told
    assert told.count("\n") == 1


class Plain(PlainDataStrategy, SingleDeviceStrategy):
    """What each of our strategies adds to a checkpoint, on one device."""


def test_our_strategies_tell_of_the_module_whatever_writes_the_checkpoint(tmp_path: Path) -> None:
    path = trained(Net(), tmp_path, strategy=Plain("cpu"), callbacks=[ModelCheckpoint(tmp_path)])
    assert content_of(path)[MODULE] == {"class": f"{Net.__module__}.Net"}


def test_a_module_is_made_again_from_its_file_alone(tmp_path: Path) -> None:
    module = Net().eval()
    consolidate(trained(module, tmp_path), tmp_path / "w.ckpt")
    made = make_module(content_of(tmp_path / "w.ckpt"))
    assert not made.training
    images = torch.randint(0, 255, (5, 1, 3, 3), dtype=torch.uint8)
    assert torch.equal(made(images), module.eval()(images))
