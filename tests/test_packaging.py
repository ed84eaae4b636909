"""What is in the wheel, and that it works alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# What a build reads.
SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "src",
    "conf",
    "recipes",
    "environments",
    "constraints.txt",
    "tests",
    "benchmarks",
)
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built in a copy of the tree: setuptools writes beside the sources."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, copy / name)
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(copy))
    (built,) = out.glob("*.whl")
    return built


def pip(*arguments: str) -> None:
    done = subprocess.run([*PIP, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def shipped(folder: Path, pattern: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob(pattern) if "__pycache__" not in path.parts}


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {f"azureml_strategy/{name}" for name in shipped(ROOT / "src" / "azureml_strategy", "*.py")}
    package |= {f"azureml_strategy/{name}" for name in shipped(ROOT / "src" / "azureml_strategy", "*.toml")}
    for folder in ("conf", "recipes"):
        for pattern in ("*.yaml", "*.py"):
            package |= {f"azureml_strategy/{folder}/{name}" for name in shipped(ROOT / folder, pattern)}
    package |= {f"azureml_strategy/environments/{file.name}" for file in (ROOT / "environments").glob("[!_]*")}
    package |= {f"hydra_plugins/azureml_{name}/__init__.py" for name in ("searchpath", "launcher")}
    assert names == package | {"azureml_strategy/py.typed", "azureml_strategy/environments/__init__.py"}


def test_the_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment without a single dependency the command line answers, and Lightning and Hydra would find us."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    command = [str(python.with_name("azureml-strategy")), "recipes"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert {line.split()[0] for line in done.stdout.splitlines()} == recipes
    code = (
        "from importlib.metadata import distribution\n"
        "for each in sorted(distribution('azureml-strategy').entry_points): print(each.group, each.name, each.value)"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.splitlines() == entry_points()


def entry_points() -> list[str]:
    """Those of the installation that these tests run in."""
    found = sorted(distribution("azureml-strategy").entry_points)
    return [f"{each.group} {each.name} {each.value}" for each in found]


def test_this_installation_exposes_the_same() -> None:
    assert entry_points() == [
        "console_scripts azureml-strategy azureml_strategy.cli:main",
        "lightning.pytorch.callbacks_factory azureml_strategy azureml_strategy.plugin:job_callbacks",
        "pytorch_lightning.callbacks_factory azureml_strategy azureml_strategy.plugin:pytorch_lightning_callbacks",
    ]
    assert files("azureml_strategy").joinpath("py.typed").is_file()
    for folder in ("conf", "recipes"):
        here = {str(path) for path in shipped(ROOT / folder, "*.yaml")}
        installed = files(f"azureml_strategy.{folder}")
        assert here
        assert all(installed.joinpath(name).is_file() for name in here)


def test_the_oldest_versions_that_are_tested_are_those_that_are_allowed() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lowest = {each.name: str(each.specifier) for each in map(Requirement, asked)}
    lines = (ROOT / "tests" / "oldest.txt").read_text().splitlines()
    tested = {each.name: str(each.specifier) for each in map(Requirement, (line for line in lines if line[0] != "#"))}
    for name in ("lightning", "hydra-core", "mlflow"):
        version = tested[name].removeprefix("==")
        assert lowest[name].split(",")[-1].removeprefix(">=") == version.removesuffix(".0"), name
