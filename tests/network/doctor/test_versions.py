"""Packages that are missing, too old, or do not go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from azureml_strategy.network.doctor.versions import check_versions, find_unsupported


@pytest.mark.parametrize(
    ("changed", "verdict", "text"),
    [
        ({"torch": None}, "problem", "torch: it is not installed. pip install 'torch>=2.6'"),
        ({"torch": "2.5.1+cu124"}, "warning", "torch: 2.5.1+cu124 is older than 2.6"),
        ({"lightning": "2.5.3"}, "warning", "lightning: 2.5.3 is older than 2.6"),
        ({"mlflow": "3.16.0"}, "warning", "mlflow: 3.16.0 is newer than what azureml-mlflow 1.60.0"),
        ({"mlflow": "4.0"}, "warning", "pip install 'mlflow<3.16'"),
        ({"mlflow": None}, "problem", "mlflow: it is not installed"),
        ({"torch": "nightly"}, "warning", "torch: nightly is older"),
    ],
)
def test_what_does_not_work(versions: Any, changed: dict[str, Any], verdict: str, text: str) -> None:
    (finding,) = find_unsupported({**versions, **changed})
    assert finding.verdict == verdict
    assert text in str(finding)
    assert finding.advice


@pytest.mark.parametrize(
    "changed", [{}, {"torch": "2.6.0a0+ecf3bae40a.nv25.01"}, {"mlflow": "3.16.0", "azureml-mlflow": None}]
)
def test_what_works(versions: Any, changed: dict[str, Any]) -> None:
    assert not list(find_unsupported({**versions, **changed}))


def test_one_line_shows_what_is_installed(read: Callable[..., Any]) -> None:
    (finding,) = check_versions(read())
    assert finding.text == (
        "python 3.11.7, azureml-strategy 0.1.0, torch 2.13.0, cuda 12.8.90, nccl 2.27.5, lightning 2.6.6, "
        "mlflow 3.15.2, azureml-mlflow 1.60.0"
    )
