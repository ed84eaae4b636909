"""A network trained on digits by a shipped recipe, as a registered model, and Azure ML's inference server in front."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from lightning.pytorch import LightningModule
from tests.emulated import free_port
from tests.training.conftest import COMMAND, run
from torch import Tensor

from azureml_strategy.cli import main
from azureml_strategy.jobs.endpoints import DeployRequest, render_online

_START_S = 60
# A user's own network inside of our ImageClassifier: a hundredth of ResNet-50's time, and as good on digits.
PARTS = """\
import torch
from torch import nn


class SmallNet(nn.Module):
    def __init__(self, width: int, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 5, stride=2, padding=2), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, num_classes),
        )

    def forward(self, images):
        return self.layers(images)
"""
RECIPE = """\
# Digits by a network of one's own.
defaults: [resnet50_ddp, _self_]
model:
  network:
    _target_: my_parts.SmallNet
    width: 16
trainer:
  max_epochs: 2
"""


@dataclass
class Trained:
    """A trained model on disk.

    Attributes:
        code: the folder with the user's module.
        model: the folder as a registered model has it, with `weights.ckpt` below.
    """

    code: Path
    model: Path

    @property
    def weights(self) -> Path:
        return self.model / "digits" / "weights.ckpt"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Some seconds of training, and consolidated."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "code").mkdir()
    (folder / "code" / "my_parts.py").write_text(PARTS)
    (folder / "code" / "digits.yaml").write_text(RECIPE)
    options = ("trainer.accelerator=cpu", "trainer.devices=1", "tracking=console", f"output_dir={folder}/run")
    before = os.getcwd()
    os.chdir(folder / "code")
    try:
        run(COMMAND, "train", "digits.yaml", *options)
    finally:
        os.chdir(before)
    best = max((folder / "run" / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    made = Trained(folder / "code", folder / "model")
    assert main(["consolidate", str(best), str(made.weights)]) == 0
    return made


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Tensor]:
    """The 360 digits for validation: uint8 images `(N, 3, 32, 32)`, and labels."""
    from azureml_strategy.data import DigitsDataModule

    root = tmp_path_factory.mktemp("digits")
    data = DigitsDataModule(root, batch_size=360)
    data.prepare_data()
    data.setup("validate")
    loader: Any = data.val_dataloader()
    images, labels = next(iter(loader))
    return images, labels


@dataclass
class Endpoint:
    """A server on the loopback interface."""

    url: str
    log: Path

    def post(self, content: Any = None, **options: Any) -> requests.Response:
        return requests.post(f"{self.url}/score", timeout=30, **({"json": content} if content is not None else options))


@pytest.fixture(scope="session")
def inference_server() -> str:
    """Azure ML's own server, which needs an environment of its own."""
    found = Path(sys.prefix, "inference", "bin", "azmlinfsrv")
    if not found.is_file():
        pytest.skip("Azure ML's inference server is not installed: make .venv-test/inference/installed")
    return str(found)


def serve(server: str, trained: Trained, folder: Path, **variables: str) -> Iterator[Endpoint]:
    """Start the server on the folder of code that `model deploy` makes, and end it; a fixture's body."""
    request = DeployRequest(model="digits", endpoint="digits", code=trained.code)
    code: Any = render_online(request)[1].code_configuration
    port, log = free_port(), folder / "server.log"
    command = [
        server,
        "--entry_script",
        f"{code.code}/score.py",
        "--model_dir",
        str(trained.model),
        "--port",
        str(port),
    ]
    environ = {**os.environ, "AML_APP_ROOT": code.code, "PYTHONWARNINGS": "ignore", **variables}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environ, cwd=folder, stdout=file, stderr=file, start_new_session=True)
    try:
        _wait_for(port, process, log)
        yield Endpoint(f"http://127.0.0.1:{port}", log)
    finally:
        process.send_signal(signal.SIGTERM)  # to the one process of ours, which ends its workers
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a worker has loaded the model: the socket listens before."""
    limit = time.monotonic() + _START_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            if requests.get(f"http://127.0.0.1:{port}/", timeout=_START_S).status_code == 200:
                return
        except (TimeoutError, requests.ConnectionError):
            time.sleep(0.1)
    raise RuntimeError(f"The server did not start; it ended with {process.poll()}:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="session")
def endpoint(inference_server: str, trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield from serve(inference_server, trained, tmp_path_factory.mktemp("server"))


@pytest.fixture
def module(trained: Trained) -> LightningModule:
    """The trained module itself, read as its user would: by its class, not by what the file tells of it."""
    import importlib.util

    from azureml_strategy.models import ImageClassifier

    spec = importlib.util.spec_from_file_location("own_parts", trained.code / "my_parts.py")
    assert spec is not None
    assert spec.loader is not None
    parts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parts)
    made: LightningModule = ImageClassifier.load_from_checkpoint(trained.weights, network=parts.SmallNet(16))
    return made.eval()


def classes_of(module: LightningModule, images: Tensor) -> list[int]:
    """What the module's own forward says."""
    with torch.no_grad():
        found: list[int] = module(images).argmax(1).tolist()
    return found
