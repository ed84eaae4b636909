"""The scoring script of a batch endpoint, called as Azure ML does, on real files."""

from __future__ import annotations

import importlib.util
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from PIL import Image
from tests.serving.conftest import Trained, classes_of
from torch import Tensor

from azureml_strategy.data.pillow_images import open_image, to_rgb
from azureml_strategy.jobs.endpoints import DeployRequest, render_batch
from azureml_strategy.serving.inputs import ExpectedInput, read_file
from azureml_strategy.serving.predictor import ModelFaultError


@pytest.fixture
def script(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """score.py of the folder of code that `model deploy --batch` makes, after `init`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AZUREML_MODEL_DIR", str(trained.model))
    request = DeployRequest(model="digits", endpoint="digits", code=trained.code)
    deployment: Any = render_batch(request, "cpu")[1]
    path = Path(deployment.code_configuration.code, deployment.code_configuration.scoring_script)
    spec = importlib.util.spec_from_file_location("score", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        module.init()
        yield module


def rows(script: ModuleType, *paths: Path) -> list[dict[str, Any]]:
    lines = script.run([str(path) for path in paths])
    assert all("\n" not in line for line in lines)
    return [json.loads(line) for line in lines]


def test_files_of_each_kind_get_the_modules_own_classes(
    script: ModuleType, digits: tuple[Tensor, Tensor], module: LightningModule, tmp_path: Path
) -> None:
    images, labels = digits[0][:40], digits[1][:40]
    expected = classes_of(module, images)
    np.save(tmp_path / "many.npy", images.numpy())
    np.save(tmp_path / "one.npy", images[0].numpy())
    (tmp_path / "two.json").write_text(json.dumps({"data": images[:2].tolist()}))
    Image.fromarray(images[3].permute(1, 2, 0).numpy()).save(tmp_path / "three.png")
    names = ("many.npy", "one.npy", "two.json", "three.png")
    found = rows(script, *(tmp_path / name for name in names))
    assert [row["file"] for row in found] == [str(tmp_path / name) for name in names], "folders may hold equal names"
    assert [row["classes"] for row in found] == [expected, expected[:1], expected[:2], expected[3:4]]
    assert len(found[0]["outputs"]) == 40
    assert np.mean(np.array(expected) == labels.numpy()) > 0.9


def test_the_jpeg_files_of_the_data_set_are_read_as_they_are(
    script: ModuleType, digits: tuple[Tensor, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = sorted(tmp_path_factory.getbasetemp().glob("digits*/*/val/*/*.jpg"))[::10]
    found = rows(script, *files)
    right = [row["classes"] == [int(path.parent.name)] for row, path in zip(found, files, strict=True)]
    assert len(right) > 30
    assert np.mean(right) > 0.9


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_an_image_of_any_mode_has_the_pixels_that_training_reads(tmp_path: Path, mode: str) -> None:
    numbers = np.random.default_rng(0).integers(0, 65535, (8, 8), np.uint16)
    deep = Image.fromarray(numbers)
    image = deep if mode == "I;16" else Image.fromarray((numbers % 256).astype(np.uint8)).convert(mode)
    image.save(tmp_path / "image.png")
    expected = ExpectedInput((3, 8, 8), torch.uint8, 1)
    pixels = read_file(tmp_path / "image.png", expected)
    with open_image((tmp_path / "image.png").read_bytes()) as trained:
        assert np.array_equal(np.asarray(pixels)[0].transpose(1, 2, 0), np.asarray(to_rgb(trained)))


def test_a_file_that_the_model_cannot_take_gets_a_sentence_and_the_others_their_classes(
    script: ModuleType, digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    image = digits[0][0].numpy()
    np.save(tmp_path / "good.npy", image)
    np.save(tmp_path / "small.npy", image[:, :8, :8])
    np.save(tmp_path / "pickled.npy", np.array([{}], object), allow_pickle=True)
    Image.new("L", (8, 8)).save(tmp_path / "small.png")
    (tmp_path / "no.png").write_bytes(b"no image")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "open.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': (((((\n")
    head = b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1, -4)}\n"
    (tmp_path / "negative.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + b"1234")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)).save(tmp_path / "cut.png")
    content = (tmp_path / "cut.png").read_bytes()
    second = content.index(b"IDAT") + 30  # a second part whose head is damaged
    first = content[: content.index(b"IDAT") - 4] + (26).to_bytes(4, "big") + content[second - 30 : second]
    (tmp_path / "cut.png").write_bytes(first + zlib.crc32(first[-30:]).to_bytes(4, "big") + bytes(40))
    (tmp_path / "notes.txt").write_text("notes")
    wanted = {
        "good.npy": None,
        "small.npy": "The samples have the shape (1, 3, 8, 8), but the model takes (N, 3, 32, 32).",
        "pickled.npy": "The .npy file holds object, and no numbers.",
        "small.png": "small.png has 8 x 8 pixels (height x width), but the model takes 32 x 32.",
        "no.png": "no.png is no image that can be read.",
        "list.json": 'is a list, not an object with "data"',
        "empty.npy": "empty",
        "open.npy": "The .npy file has a damaged header.",
        "negative.npy": "The .npy file is longer or shorter than its header says.",
        "cut.png": "cut.png is no image that can be read.",
        "notes.txt": "notes.txt is no file of samples. Send .npy, .json or .png",
    }
    for row, words in zip(rows(script, *(tmp_path / name for name in wanted)), wanted.values(), strict=True):
        assert ("classes" in row) == (words is None)
        assert words is None or words in row["error"]
        assert str(tmp_path) not in row.get("error", "")


def test_a_fault_of_the_model_fails_the_mini_batch(script: ModuleType, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 32, 32), np.uint8))

    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    script._predictor._module.forward = broken
    with pytest.raises(ModelFaultError, match="The model failed on samples of the right shape and kind"):
        script.run([str(tmp_path / "a.npy")])


def test_a_model_without_its_file_or_its_code(
    trained: Trained, tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZUREML_MODEL_DIR", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"The model has 0 files weights\.ckpt, and one is needed"):
        script.init()
    shutil.copytree(trained.model, tmp_path / "empty" / "1")
    shutil.copytree(trained.model, tmp_path / "empty" / "2")
    with pytest.raises(ValueError, match=r"The model has 2 files weights\.ckpt"):
        script.init()
