from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from azureml_strategy.tracking.source import (
    command_run_name,
    command_text,
    git_tags,
    recipe_run_name,
    script_run_name,
    with_source_tags,
)

TOKEN = "hf_" + "aB3" * 11


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@f"]
    return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def commit() -> str:
    """A checkout in the working folder with one commit, an ignored folder `out` and a remote with a token."""
    git("init", "-q", "-b", "trunk", ".")
    Path("train.py").write_text("print()\n")
    Path(".gitignore").write_text("out\n")
    Path("out").mkdir()
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    git("remote", "add", "origin", "https://me:abcdef012345@github.com/o/r")
    return git("rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["model.learning_rate=0.1", "trainer.max_epochs=3"], "r model.learning_rate=0.1 trainer.max_epochs=3"),
        (["+vars.x=1", "~callbacks", "model=gpt/tiny"], "r +vars.x=1 ~callbacks model=gpt/tiny"),
        (["output_dir=a", "tracking.logger.run_name=x", "tracking=console", "checkpoint.every_minutes=1"], "r"),
        (["cluster=nc24ads_a100_v4", "cluster.num_nodes=2"], "r"),
        (["data.root=/d", "a=~/x", "b='./x y'", "c=[1,/d]", "d={e: ../f}", "e=https://f", "f=azureml:g@latest"], "r"),
        (["++vars.api_key=abcdefgh", f"vars.x={TOKEN}", "vars.db.password=1"], "r"),
        (["a=naïve\n\tμ\x00", "b=\udcff"], "r a=naïve μ b="),
        ([f"a{number}={'x' * 30}" for number in range(9)], f"r a0={'x' * 30} a1={'x' * 30} a2={'x' * 30} +6"),
        ([f"a={'x' * 500}"], "r +1"),
    ],
)
def test_the_name_of_a_recipe_s_run(overrides: list[str], name: str) -> None:
    assert recipe_run_name("r", overrides) == name
    assert len(recipe_run_name("r" * 300, overrides)) <= 120


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/a/b/train.py", "--lr", "1"], "train"),
        (["/a/package/__main__.py"], "package"),
        (["/p/ipykernel_launcher.py"], "notebook"),
        (["-c"], "python"),
        ([""], "python"),
        ([], "python"),
        (["x" * 300 + ".py"], "x" * 120),
    ],
)
def test_the_name_of_a_script_s_run(argv: list[str], name: str) -> None:
    assert script_run_name(argv) == name


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("azureml-strategy train resnet50_ddp seed=1 tracking=console", "resnet50_ddp seed=1"),
        ("/venv/bin/azureml-strategy train own/digits.yaml ~callbacks --config-dir=c -m", "digits ~callbacks"),
        ("azureml-strategy train", "train"),
        ("azureml-strategy bench --pairs", "bench"),
        ("azureml-strategy", "azureml-strategy"),
        ("python train.py --lr 0.1", "train"),
        ("/usr/bin/python3.11 -u a/fit.py", "fit"),
        ("python -m package.train --lr 0.1", "train"),
        ("python -c 'print()'", "python"),
        ("./run.sh", "run"),
        ("env OMP_NUM_THREADS=2 azureml-strategy train resnet50_ddp seed=1", "resnet50_ddp seed=1"),
        ("env", "env"),
    ],
)
def test_the_name_of_a_command_s_run(command: str, name: str) -> None:
    assert command_run_name(shlex.split(command)) == name


def test_a_command_line_for_a_shell_without_secrets() -> None:
    words = ["train", "a b", "vars.api_key=my secret", "--token", "x y z", "--lr", "1", f"u={TOKEN}", "\udcff"]
    assert command_text(words) == (
        "train 'a b' 'vars.api_key=<redacted>' --token '<redacted>' --lr 1 'u=<redacted>' '?'"
    )


def test_the_commit_and_whether_it_is_all(commit: str) -> None:
    Path("untracked.txt").write_text("")
    tags = git_tags(Path())
    assert tags == {
        "mlflow.source.git.commit": commit,
        "mlflow.source.git.branch": "trunk",
        "mlflow.source.git.repoURL": "https://me:abcdef012345@github.com/o/r",
        "azureml_strategy.git_uncommitted_changes": "false",
    }
    Path("train.py").write_text("print(1)\n")
    git("checkout", "-q", "--detach")
    changed = git_tags(Path().absolute())
    assert changed["azureml_strategy.git_uncommitted_changes"] == "true"
    assert "mlflow.source.git.branch" not in changed


@pytest.mark.usefixtures("commit")
def test_no_commit_where_git_knows_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_tags(Path("out")) == {}, "git ignores it"
    assert git_tags(Path("missing")) == {}
    (tmp_path / "empty").mkdir()
    git("init", "-q", "empty")
    assert git_tags(Path("empty")) == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_tags(Path()) == {}, "no git"


def test_a_script_has_its_command_and_commit_and_a_recipe_its_own(
    commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "train.py", "--api-key", "abcdefgh"])
    tags = with_source_tags({"mine": "1"})
    assert tags["azureml_strategy.command"] == "python3 train.py --api-key '<redacted>'"
    assert (tags["mlflow.source.git.commit"], tags["mine"]) == (commit, "1")
    recipe = with_source_tags({"azureml_strategy.recipe": "r", "azureml_strategy.command": "c"})
    assert recipe["azureml_strategy.command"] == "c"
    assert not [name for name in recipe if "git" in name], "it is that of the program that runs recipes"
