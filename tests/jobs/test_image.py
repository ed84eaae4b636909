"""Environments: built ahead of the jobs that use them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from tests.jobs.azure_service import AzureService

from azureml_strategy.cli import main
from azureml_strategy.jobs.entities import as_yaml


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A folder with a Dockerfile."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "Dockerfile").write_text("FROM ubuntu\n")
    return tmp_path / "docker"


def test_a_dry_run_prints_what_azure_takes(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from azure.ai.ml import load_environment

    (context / "conda.yaml").write_text("dependencies:\n- numpy\n")
    for arguments in (
        ["--build", str(context)],
        ["--image", "ubuntu:24.04", "--conda-file", str(context / "conda.yaml")],
        ["--image", "ubuntu:24.04", "--version", "7"],
    ):
        assert main(["environment", "build", "mine", *arguments, "--dry-run"]) == 0
        text = capsys.readouterr().out
        assert as_yaml(load_environment(io.StringIO(text))) == text
    assert text == "image: ubuntu:24.04\nname: mine\ntags: {}\nversion: '7'\n"


def test_it_is_uploaded_registered_and_tried(
    azure_service: AzureService, context: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["environment", "build", "mine", "--build", str(context)]) == 0
    assert capsys.readouterr().out == "azureml:mine:1\n"
    stored = azure_service.workspace.resources["environments/mine/versions/1"]["properties"]
    assert stored["build"]["dockerfilePath"] == "Dockerfile"
    assert any(key.endswith("/docker/Dockerfile") for key in azure_service.blobs.content)
    assert len(azure_service.jobs) == 0

    assert main(["environment", "build", "mine", "--image", "ubuntu", "--version", "9", "--check"]) == 0
    (name,) = azure_service.jobs
    assert f"azureml-strategy jobs logs {name} --follow" in capsys.readouterr().out
    sent = azure_service.jobs[name].body["properties"]
    assert sent["command"] == "azureml-strategy --version"
    assert sent["environmentId"].endswith("/environments/mine/versions/9")
    assert sent.get("computeId") is None  # serverless

    assert main(["environment", "build", "mine", "--image", "ubuntu", "--check", "cpu"]) == 0
    *_, last = azure_service.jobs
    assert azure_service.jobs[last].body["properties"]["computeId"].endswith("/computes/cpu")


def test_what_contradicts_is_refused(context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--build", str(context), "--image", "ubuntu", "--dry-run"]
    assert main(["environment", "build", "mine", *arguments]) == 2
    assert "image and build" in capsys.readouterr().err
