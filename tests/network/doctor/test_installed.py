"""Versions come from the metadata of installed packages, not from importing them."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import lightning
import torch

import azureml_strategy
from azureml_strategy.network.doctor.installed import installed_versions


def test_versions_are_those_of_the_packages() -> None:
    found = installed_versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert found["lightning"] == lightning.__version__
    assert found["azureml-strategy"]


def test_an_environment_without_packages() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from azureml_strategy.network.doctor.installed import installed_versions\n"
        "found = installed_versions(); print(found['python'], found['torch'], found['lightning'], found['mlflow'])"
    )
    source = str(Path(azureml_strategy.__file__).parents[1])
    bare = [sys.executable, "-I", "-S", "-c", code, source]  # -S leaves site-packages out
    done = subprocess.run(bare, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [platform.python_version(), "None", "None", "None"]
