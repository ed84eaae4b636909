"""The example of LightningCLI on two emulated nodes: the numbers of a script that makes the same Trainer itself."""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.emulated import SHARED_MACHINE
from tests.preloaded import start_forked

from azureml_strategy.emulator import EmulatedJob, emulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_cli"
SHORT = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false", "--data.samples", "1024"]
CSV = ["--trainer.logger", "lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir"]
CLASS_PATH = "azureml_strategy.strategies.AzureMLDDPStrategy"
PLAIN = """
import azureml_strategy
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from train import Circle, Points
seed_everything(1, workers=True)
trainer = Trainer(strategy="azureml_ddp", max_epochs=1, log_every_n_steps=4, logger=CSVLogger("plain"))
trainer.fit(Circle(), datamodule=Points(samples=1024))
"""


@pytest.fixture
def example(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "example"))


@pytest.fixture
def on_two_nodes(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run a script in the example's folder, and return what the job prints; it must succeed."""
    monkeypatch.setattr("azureml_strategy.emulator.processes._start", start_forked)
    monkeypatch.chdir(example)
    for name, value in SHARED_MACHINE.items():
        monkeypatch.setenv(name, value)

    def run(*command: str) -> str:
        capsys.readouterr()
        exit_code = emulate(EmulatedJob([sys.executable, *command], nodes=2))
        output = capsys.readouterr().out
        assert exit_code == 0, output
        return output

    return run


def losses(folder: Path) -> list[str]:
    (file,) = folder.glob("**/metrics.csv")
    return [row["train/loss"] for row in csv.DictReader(file.read_text().splitlines()) if row["train/loss"]]


@pytest.mark.slow
def test_it_trains(example: Path, on_two_nodes: Callable[..., str]) -> None:
    fit = on_two_nodes("train.py", "fit", "--config", "config.yaml", *SHORT)
    assert "val/accuracy" in fit
    (checkpoint,) = example.glob("outputs/checkpoints/*.ckpt")
    assert len(list(example.glob("mlruns/*/*/artifacts/config.yaml"))) == 1, "in the job's run"
    assert (example / "config.yaml").read_text() == (EXAMPLE / "config.yaml").read_text(), "the user's own file"
    assert checkpoint.is_file()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_evaluates(example: Path, on_two_nodes: Callable[..., str]) -> None:
    on_two_nodes("train.py", "fit", "--config", "config.yaml", *SHORT)
    (checkpoint,) = example.glob("outputs/checkpoints/*.ckpt")
    for verb in ("validate", "test"):
        words = ("train.py", verb, "--config", "config.yaml", *SHORT, "--ckpt_path", str(checkpoint))
        assert "val/accuracy" in on_two_nodes(*words)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_name_and_a_class_path_give_the_losses_of_the_plain_script(
    example: Path, on_two_nodes: Callable[..., str]
) -> None:
    (example / "plain.py").write_text(PLAIN)
    on_two_nodes("plain.py")
    fit = ["train.py", "fit", "--config", "config.yaml", *SHORT, *CSV]
    on_two_nodes(*fit, "name")
    on_two_nodes(*fit, "path", "--trainer.strategy.class_path", CLASS_PATH)
    bf16 = ["--trainer.strategy", CLASS_PATH, "--trainer.strategy.gradient_compression", "bf16"]
    on_two_nodes(*fit, "bf16", *bf16)
    plain = losses(example / "plain")
    assert len(plain) == 2
    assert losses(example / "name") == losses(example / "path") == plain
    assert losses(example / "bf16") != plain
    assert len(list(example.glob("name/**/config.yaml"))) == 1, "saved once, beside the curve"
