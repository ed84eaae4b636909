from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

import azureml_strategy
from azureml_strategy.network.doctor.software import (
    check_tracking,
    check_versions,
    find_unsupported,
    installed_versions,
)
from azureml_strategy.tracking.run_page import _versions


@pytest.mark.parametrize(
    ("changed", "verdict", "text"),
    [
        ({"torch": None}, "problem", "torch: it is not installed. pip install 'torch>=2.8'"),
        ({"torch": "2.7.1+cu126"}, "warning", "torch: 2.7.1+cu126 is older than 2.8"),
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
    "changed", [{}, {"torch": "2.8.0a0+ecf3bae40a.nv25.01"}, {"mlflow": "3.16.0", "azureml-mlflow": None}]
)
def test_what_works(versions: Any, changed: dict[str, Any]) -> None:
    assert not list(find_unsupported({**versions, **changed}))


def test_one_line_shows_what_is_installed(read: Callable[..., Any]) -> None:
    (finding,) = check_versions(read())
    assert finding.text == (
        "python 3.11.7, azureml-strategy 0.1.0, torch 2.13.0, cuda 12.8.90, nccl 2.27.5, lightning 2.6.6, "
        "mlflow 3.15.2, azureml-mlflow 1.60.0"
    )


def test_versions_are_those_of_the_packages() -> None:
    found = installed_versions()
    assert found["python"] == platform.python_version()
    assert torch.__version__.startswith(str(found["torch"])), "which may name the build beside it"
    assert found["lightning"] == lightning.__version__
    assert found["azureml-strategy"]


@pytest.mark.parametrize(
    ("distribution", "name"),
    [
        ("mlflow_skinny", "mlflow"),  # all that a plain install brings
        ("mlflow", "mlflow"),
        ("nvidia_nccl_cu12", "nccl"),
        ("nvidia_nccl_cu13", "nccl"),
        ("nvidia_cuda_runtime", "cuda"),
        ("nvidia_cuda_runtime_cu12", "cuda"),
    ],
)
def test_a_package_is_found_by_each_name_of_its_distributions(
    distribution: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / f"{distribution}-3.15.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution.replace('_', '-')}\nVersion: 3.15.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert {each for each, version in installed_versions().items() if version == "3.15.0"} == {name}
    if name == "mlflow":
        assert "mlflow 3.15.0" in _versions(), "of a run's record"


def test_an_environment_without_packages() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from azureml_strategy.network.doctor.software import installed_versions\n"
        "found = installed_versions(); print(found['python'], found['torch'], found['lightning'], found['mlflow'])"
    )
    source = str(Path(azureml_strategy.__file__).parents[1])
    bare = [sys.executable, "-I", "-S", "-c", code, source]  # -S leaves site-packages out
    done = subprocess.run(bare, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [platform.python_version(), "None", "None", "None"]


ReadFacts = Callable[..., Any]


@pytest.mark.parametrize(
    ("uri", "text"),
    [(None, "mlflow.db in the working directory"), ("http://user:secret@host:5000", "http store"), ("", "mlflow.db")],
)
def test_outside_a_job(read: ReadFacts, uri: str | None, text: str) -> None:
    (finding,) = check_tracking(read({} if uri is None else {"MLFLOW_TRACKING_URI": uri}))
    assert finding.verdict == "ok"
    assert text in finding.text
    assert "secret" not in finding.text


def test_in_a_job(read: ReadFacts, job: ReadFacts) -> None:
    (finding,) = check_tracking(read(job()))
    assert (finding.verdict, finding.text) == ("ok", "azureml store, run quirky_plum")


def test_azure_store_without_its_plugin(read: ReadFacts, job: ReadFacts) -> None:
    (finding,) = check_tracking(read(job(), **{"azureml-mlflow": None}))
    assert finding.verdict == "problem"
    assert finding.advice == "pip install -c constraints.txt '.[azure]' in a clone of azureml-strategy"


@pytest.mark.parametrize(
    "missing", [["MLFLOW_RUN_ID"], ["MLFLOW_TRACKING_URI"], ["MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"]]
)
def test_a_job_that_lost_its_run(read: ReadFacts, job: ReadFacts, missing: list[str]) -> None:
    environ = {name: value for name, value in job().items() if name not in missing}
    (finding,) = check_tracking(read(environ))
    assert finding.verdict == "warning"
    assert finding.text.startswith(f"{' and '.join(missing)} not set")
