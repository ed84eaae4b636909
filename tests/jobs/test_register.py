"""Models: a run's weights as one file, without its optimizer."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import pytest
import torch
from tests.jobs.azure_service import AzureService
from tests.jobs.test_listing import submit

from azureml_strategy.checkpoint.manifest import Manifest, StoredFile
from azureml_strategy.cli import main
from azureml_strategy.jobs.inputs import OutputFiles
from azureml_strategy.jobs.register import choose_checkpoint
from azureml_strategy.jobs.service_errors import JobError

_CHECKPOINT = {
    "state_dict": {"weight": torch.arange(4.0)},
    "hyper_parameters": {"width": 4},
    "optimizer_states": [{"momentum": torch.zeros(1000)}],
    "pytorch-lightning_version": "2.5.0",
    "epoch": 3,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    torch.save(_CHECKPOINT, path)
    return path


def _registered(service: AzureService) -> dict[str, object]:
    """The one file of the registered model."""
    found = [content for key, content in service.blobs.content.items() if key.endswith("/weights.ckpt")]
    assert len(found) == 1
    loaded: dict[str, object] = torch.load(io.BytesIO(found[0]), weights_only=False)
    return loaded


def test_the_weights_of_a_job(
    azure_service: AzureService, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(azure_service, "job", "Completed")
    azure_service.write_output("job", "run", "checkpoints/last.ckpt", checkpoint.read_bytes())
    azure_service.write_output("job", "run", "checkpoints/epoch=3-step=88.ckpt", checkpoint.read_bytes())
    assert main(["model", "register", "resnet50", "--job", "job"]) == 0
    told, advice = capsys.readouterr().out.splitlines()
    assert told == "azureml:resnet50:1  1 tensors, 4 numbers"
    assert advice.startswith("Its file does not tell the class of its module.")
    stored = azure_service.workspace.resources["models/resnet50/versions/1"]["properties"]
    assert stored["modelType"] == "custom_model"
    assert stored["tags"] == {
        "job": "job",
        "checkpoint": "checkpoints/epoch=3-step=88.ckpt",
        "status": "Completed",
        "recipe": "resnet50_ddp",
    }
    weights = _registered(azure_service)
    moved = {"azureml_strategy_moved"}  # a hyperparameter that torch would not read by itself
    assert set(weights) - moved == set(_CHECKPOINT) - {"optimizer_states"}
    assert not azure_service.asked("GET", "last.ckpt")  # only the one that is meant is fetched


def _store(service: AzureService, step: int, score: float | None, content: bytes, size: int | None = None) -> None:
    """A checkpoint as `JobCheckpoint` leaves it."""
    name = f"step={step}.ckpt"
    files = {name: StoredFile(len(content) if size is None else size, zlib.crc32(content))}
    manifest = Manifest(name, step, 0, float(step), 1, "epoch", score, "max", files)
    service.write_output("job", "run", f"checkpoints/{name}", content)
    service.write_output("job", "run", f"checkpoints/{name}.manifest.json", manifest.to_text().encode())


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ({10: 0.7, 20: 0.9, 30: 0.8}, 20),
        ({10: None, 20: None}, 20),
        ({10: 0.5, 20: None}, 10),
    ],
)
def test_the_best_or_the_newest_of_a_recipes_checkpoints(
    azure_service: AzureService, checkpoint: Path, scores: dict[int, float | None], chosen: int
) -> None:
    submit(azure_service, "job", "Completed")
    for step, score in scores.items():
        _store(azure_service, step, score, checkpoint.read_bytes())
    azure_service.write_output("job", "run", "checkpoints/step=40.ckpt", b"half-written: it has no manifest")
    assert main(["model", "register", "resnet50", "--job", "job"]) == 0
    stored = azure_service.workspace.resources["models/resnet50/versions/1"]["properties"]
    assert stored["tags"]["checkpoint"] == f"checkpoints/step={chosen}.ckpt"


def test_a_damaged_checkpoint_is_not_registered(
    azure_service: AzureService, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(azure_service, "job", "Completed")
    content = checkpoint.read_bytes()
    _store(azure_service, 10, 0.5, content, size=len(content) + 1)
    assert main(["model", "register", "resnet50", "--job", "job"]) == 2
    assert "checkpoints/step=10.ckpt of job is damaged: step=10.ckpt has" in capsys.readouterr().err
    assert "models/resnet50/versions/1" not in azure_service.workspace.resources


def test_a_checkpoint_that_lies_here(
    azure_service: AzureService, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("1", "2"):
        assert main(["model", "register", "mine", "--path", str(checkpoint)]) == 0
        assert capsys.readouterr().out.startswith(f"azureml:mine:{version} ")
    assert main(["model", "register", "mine", "--path", str(checkpoint.parent / "none.ckpt")]) == 2
    assert "There is no " in capsys.readouterr().err


def test_a_path_in_a_job_and_one_here_are_not_both_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "register", "m", "--path", str(tmp_path), "--checkpoint", "last.ckpt"]) == 2
    assert "Give --job JOB with them" in capsys.readouterr().err


def test_a_job_that_is_not_over_or_has_no_such_output(
    azure_service: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(azure_service, "job", "Running")
    assert main(["model", "register", "mine", "--job", "job"]) == 2
    assert "job is Running. A model is registered when its job is over" in capsys.readouterr().err
    submit(azure_service, "job", "Completed")
    assert main(["model", "register", "mine", "--job", "job", "--output", "rum"]) == 2
    assert "job has no output 'rum'" in capsys.readouterr().err


def test_a_sharded_checkpoint_is_fetched_with_all_its_parts(azure_service: AzureService, tmp_path: Path) -> None:
    submit(azure_service, "job", "Completed")
    for name in ("checkpoints/last.ckpt/latest", "checkpoints/last.ckpt/zero/rank_0.pt", "checkpoints/last.ckpt.txt"):
        azure_service.write_output("job", "run", name, name.encode())
    files = OutputFiles(azure_service.client(), "job", "run")
    fetched = files.fetch(choose_checkpoint(files.names, None, {}), tmp_path)
    assert fetched == tmp_path / "last.ckpt"
    found = {path.relative_to(fetched).as_posix() for path in fetched.rglob("*") if path.is_file()}
    assert found == {"latest", "zero/rank_0.pt"}


@pytest.mark.parametrize(
    ("names", "asked", "chosen"),
    [
        (["c/last.ckpt", "c/epoch=1.ckpt"], None, "c/epoch=1.ckpt"),
        (["c/last.ckpt", "c/last-v1.ckpt"], None, "c/last.ckpt"),
        (["c/last.ckpt/latest", "c/last.ckpt/zero/x.pt", "log.txt"], None, "c/last.ckpt"),
        (["c/epoch=1.ckpt", "c/epoch=2.ckpt"], "c/epoch=1.ckpt", "c/epoch=1.ckpt"),
        (["c/last.ckpt/meta.pt"], "/c/last.ckpt/", "c/last.ckpt"),
    ],
)
def test_which_checkpoint_is_meant(names: list[str], asked: str | None, chosen: str) -> None:
    assert choose_checkpoint(names, asked, {}) == chosen


@pytest.mark.parametrize(
    ("names", "asked", "words"),
    [
        ([], None, r"There is no checkpoint \(\*\.ckpt\)"),
        (["a.ckpt", "b.ckpt"], None, r"Its checkpoints: a\.ckpt, b\.ckpt\. Type --checkpoint"),
        (["a.ckpt"], "b.ckpt", r"no b\.ckpt\. Its checkpoints: a\.ckpt"),
    ],
)
def test_what_is_not_clear_is_asked(names: list[str], asked: str | None, words: str) -> None:
    with pytest.raises(JobError, match=words):
        choose_checkpoint(names, asked, {})
