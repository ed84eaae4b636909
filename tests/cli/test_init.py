"""What `init` makes, and that each command which it prints runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from azureml_strategy.cli import main

PROGRAM = [sys.executable, "-m", "azureml_strategy.cli"]
PROJECT = Path(__file__).parents[2] / "project"
MADE = sorted(path.name for path in PROJECT.iterdir() if path.is_file())


def test_every_file_is_made_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "new/my project"]) == 0
    assert sorted(path.name for path in Path("new/my project").iterdir()) == MADE
    assert all(Path("new/my project", name).read_bytes() == (PROJECT / name).read_bytes() for name in MADE)
    said = capsys.readouterr().out
    assert all(name in said for name in MADE)
    assert "  cd 'new/my project'\n" in said
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["init"]) == 0
    assert sorted(os.listdir()) == MADE
    assert "  cd " not in capsys.readouterr().out


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("mine")
    (tmp_path / "README.md").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert f"{tmp_path} has README.md and train.py already, which stays as it is" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"train.py": "mine", "README.md": "mine"}


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["init", str(tmp_path / "file" / "new")]) == 2
    assert "Name another folder" in capsys.readouterr().err


def test_what_it_requires_is_what_is_tested() -> None:
    lines = (PROJECT / "requirements.txt").read_text().splitlines()
    asked = [Requirement(line) for line in lines if not line.startswith(("#", "-c constraints.txt"))]
    assert {each.name for each in asked} == {"torch", "lightning"}
    assert all(each.specifier.contains(version(each.name)) for each in asked)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_every_command_of_its_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the submission of a script, in their order, in the folder."""
    assert main(["init", str(tmp_path / "project")]) == 0
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    text = Path("README.md").read_text()
    commands = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)).splitlines()
    commands.remove("azureml-strategy submit train.py cluster=nc24ads_a100_v4 --dry-run")
    assert len(commands) == 6
    outputs = {command: _run(command) for command in commands}
    assert "1 processes, val/accuracy 0.9" in outputs["python train.py"]
    emulated = outputs["azureml-strategy emulate --nodes 2 -- python train.py"]
    assert "2 processes, val/accuracy 0.9" in emulated
    assert "val/accuracy |" in outputs["azureml-strategy train recipe.yaml"]
    assert "azureml-strategy train ./recipe.yaml" in outputs[commands[-1]], "the job's command"
    assert len(list(Path("outputs").glob("**/*.ckpt"))) > 4


def _run(command: str) -> str:
    """Run a line as a shell in this environment would; its output."""
    words = shlex.split(command)
    program = {"python": [sys.executable], "azureml-strategy": PROGRAM}[words[0]]
    inner = [part for word in words[1:] for part in (PROGRAM if word == "azureml-strategy" else [word])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*program, *inner], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
