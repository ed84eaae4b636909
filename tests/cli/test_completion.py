"""What the shell completes, by argcomplete's own protocol, and in a bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from azureml_strategy.cli import main

PROGRAM = [sys.executable, "-m", "azureml_strategy.cli"]
BASH = shutil.which("bash")
# What bash does at the Tab key, and the words that it would show.
TAB = """
azureml-strategy() {{ {program} "$@"; }}
source {script}
COMP_LINE={line}; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9
$(complete -p azureml-strategy | sed 's/.*-F \\([^ ]*\\).*/\\1/') azureml-strategy
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(line: str, folder: Path) -> list[str]:
    """The candidates for the last word of a line."""
    environ = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "candidates.txt"),
        "COMP_LINE": f"azureml-strategy {line}",
        "COMP_POINT": str(len(f"azureml-strategy {line}")),
    }
    done = subprocess.run(PROGRAM, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (folder / "candidates.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("tr", ["train"]),
        ("cluster ", ["create", "show", "delete"]),
        ("train resnet50_s", ["resnet50_synthetic"]),
        ("train mi", ["mine.yaml"]),
        ("train resnet50_ddp clu", ["cluster="]),
        (
            "train resnet50_ddp seed=1 tracking=",
            ["tracking=console", "tracking=mlflow", "tracking=tensorboard", "tracking=wandb"],
        ),
        ("train resnet50_ddp -m cluster=nc24", ["cluster=nc24ads_a100_v4"]),
        ("train resnet50_ddp job.identity.", ["job.identity.type=", "job.identity.client_id="]),
        ("train resnet50_ddp cluster.num", ["cluster.num_nodes="]),
        ("study resnet50_s", ["resnet50_synthetic"]),
        ("study resnet50_ddp --nod", ["--nodes"]),
        ("study resnet50_ddp --nodes ", []),
        ("study resnet50_ddp --nodes 1,2 tracking=c", ["tracking=console"]),
        ("submit resnet50_ddp --dry", ["--dry-run"]),
        ("submit resnet50_ddp tracking=c", ["tracking=console"]),
        ("emulate --bandw", ["--bandwidth"]),
        ("emulate --nodes 2 -- python scr", ["script.py"]),
        ("cluster create --size nc24", ["nc24ads_a100_v4"]),
        ("init ", ["folder/"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("trian resnet50_s", []),
    ],
)
def test_a_word_is_completed(line: str, wanted: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "script.py").touch()
    (tmp_path / "folder").mkdir()
    assert completed(line, tmp_path) == wanted


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("azureml-strategy tr", ["train"]),
        ("azureml-strategy train resnet50_ddp cluster=nc24", ["nc24ads_a100_v4"]),  # bash breaks words at the sign
        ("azureml-strategy train resnet50_ddp clu", ["cluster="]),
    ],
)
def test_a_bash_completes(line: str, wanted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    text = TAB.format(program=" ".join(PROGRAM), script=tmp_path / "script", line=f"'{line}'")
    done = subprocess.run([str(BASH), "--norc", "-c", text], capture_output=True, text=True, check=True)
    assert [each.strip() for each in done.stdout.splitlines()] == wanted, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_names_the_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert "azureml-strategy" in said
    assert "_ARGCOMPLETE" in said


def test_a_shell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "bsh"])
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err


def test_nothing_heavy_is_imported_to_complete(tmp_path: Path) -> None:
    """Lines that are not about keys need argcomplete alone."""
    code = (
        "import os, sys\nos._exit = sys.exit\nfrom azureml_strategy.cli import main\n"
        "import atexit\natexit.register(lambda: print(sorted(name for name in sys.modules if '.' not in name)))\nmain()"
    )
    environ = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "candidates.txt"),
        "COMP_LINE": "azureml-strategy train res",
        "COMP_POINT": "26",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    for name in ("torch", "lightning", "mlflow", "hydra", "omegaconf", "numpy", "rich", "azure", "yaml"):
        assert f"'{name}'" not in done.stdout
    assert "'argcomplete'" in done.stdout
