from __future__ import annotations

import math

import pytest

import azureml_strategy
import azureml_strategy.cluster
from azureml_strategy.lazy import lazy_attributes


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
