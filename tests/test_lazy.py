from __future__ import annotations

import math
import subprocess
import sys
from types import ModuleType

import pytest

import azureml_strategy
import azureml_strategy.cluster
from azureml_strategy.lazy import lazy_attributes, missing_extra, require_library


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("package")
    monkeypatch.setitem(sys.modules, "package", module)
    return module


def test_a_name_comes_from_its_module(package: ModuleType) -> None:
    assert lazy_attributes("package", {"sqrt": "math"})("sqrt") is math.sqrt


def test_dir_shows_the_names_beside_what_is_there(package: ModuleType) -> None:
    before = dir(package)
    lazy_attributes("package", {"sqrt": "no_such_module"})
    package.version = "1"  # type: ignore[attr-defined]
    assert dir(package) == sorted([*before, "__dir__", "sqrt", "version"])


def test_dir_shows_every_public_name_and_imports_nothing() -> None:
    code = (
        "import sys; from importlib import import_module; from pathlib import Path; import azureml_strategy\n"
        "folders = Path(azureml_strategy.__file__).parent.glob('*/__init__.py')\n"
        "lazy = [each.parent.name for each in folders if 'lazy_attributes' in each.read_text()]\n"
        "packages = [azureml_strategy, *(import_module(f'azureml_strategy.{name}') for name in lazy)]\n"
        "before = set(sys.modules)\n"
        "missing = [name for each in packages for name in each.__all__ if name not in dir(each)]\n"
        "print(len(packages), missing, set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages, found = done.stdout.split(maxsplit=1)
    assert int(packages) > 9
    assert found == "[] set()\n"


def test_another_name_is_an_attribute_error_as_for_any_module(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'package' has no attribute 'cube'"):
        lazy_attributes("package", {"sqrt": "math"})("cube")
    assert not hasattr(azureml_strategy, "AzureMLDPStrategy")


@pytest.mark.parametrize("name", azureml_strategy.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(azureml_strategy, name).__name__ == name


@pytest.mark.parametrize("name", azureml_strategy.cluster.__all__)
def test_every_public_name_of_cluster_is_there(name: str) -> None:
    assert getattr(azureml_strategy.cluster, name).__name__ == name


def test_the_network_and_the_launch_answer_without_torch() -> None:
    code = (
        "import pkgutil, sys; from importlib import import_module; import azureml_strategy.network as network\n"
        "names = [each.name for each in pkgutil.walk_packages(network.__path__, network.__name__ + '.')]\n"
        "names += ['azureml_strategy.cluster.launchers', 'azureml_strategy.cluster.job', 'azureml_strategy.cli']\n"
        "for name in names: import_module(name)\n"
        "print(len(names), sorted({'torch', 'lightning', 'mlflow', 'hydra', 'rich'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, heavy = done.stdout.split(maxsplit=1)
    assert int(modules) > 25
    assert heavy == "[]\n"


def test_a_library_that_is_missing_is_known_before_the_work_begins() -> None:
    require_library("torch")
    with pytest.raises(ModuleNotFoundError) as missing:
        require_library("no_such_library")
    assert missing_extra(missing.value) is None
    advice = missing_extra(ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.figure"))
    line = "pip install -c constraints.txt '.[report]' in a clone of azureml-strategy"
    assert advice == f"matplotlib is not installed here. Type: {line}"
