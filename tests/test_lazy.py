from __future__ import annotations

import math
import subprocess
import sys

import pytest

import azureml_strategy
import azureml_strategy.cluster
from azureml_strategy.lazy import lazy_attributes, missing_extra, require_library


def test_a_name_comes_from_its_module() -> None:
    assert lazy_attributes("package", {"sqrt": "math"})("sqrt") is math.sqrt


def test_another_name_is_an_attribute_error_as_for_any_module() -> None:
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
    assert advice == "matplotlib is not installed here. Type: pip install 'azureml-strategy[report]'"
