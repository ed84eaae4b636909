"""What `make lint` runs, beside the other tests: style, types and the rooms of ARCHITECTURE.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("command", ["mypy", "lint-imports", "ruff check .", "ruff format --check ."])
def test_nothing_is_found(command: str) -> None:
    program, *arguments = command.split()
    path = Path(sys.executable).with_name(program)
    assert path.exists(), f"{program} is not installed: pip install -e '.[dev]'"
    # As in a shell at the project's folder; two of them read sys.path to know what is imported.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([path, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
