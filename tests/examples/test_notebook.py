"""The example's notebook in a real kernel, which must leave no process behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook" / "train.ipynb"
FOLDERS = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")


def test_it_has_no_outputs() -> None:
    cells = [cell for cell in json.loads(EXAMPLE.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * 4


@pytest.mark.slow
def test_it_trains_on_two_processes(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    environ = {**os.environ, **{name: str(tmp_path / name.lower()) for name in FOLDERS}}
    # Without a kernelspec Jupyter takes this interpreter.
    words = ["--to", "notebook", "--execute", "--output", "done.ipynb", "--KernelSpecManager.kernel_dirs=[]"]
    command = [sys.executable, "-m", "nbconvert", *words, EXAMPLE.name]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = (tmp_path / "done.ipynb").read_text()
    assert "2 processes, accuracy 0.9" in printed
    assert "image/png" in printed, "the curve"
    assert not processes_with("HOME", environ["HOME"])


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Processes of the kernel or of its trainings; also those that have lost their parent."""
    return [each for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get(name) == value]
