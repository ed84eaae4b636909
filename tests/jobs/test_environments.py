from __future__ import annotations

import io
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from azure.ai.ml.entities import Environment
from tests.jobs.azure_service import AzureService
from tests.jobs.rendering import SIZE, cache, rendered

from azureml_strategy.cli import main
from azureml_strategy.jobs.client import as_yaml
from azureml_strategy.jobs.environments import job_environment
from azureml_strategy.jobs.image import build_folder
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.settings import EnvironmentSettings

__all__ = ["cache"]  # a fixture


@pytest.mark.parametrize(
    "name",
    [
        "azureml:mine:3",
        "azureml:mine@latest",
        "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest",
    ],
)
def test_a_registered_or_curated_one(name: str) -> None:
    assert rendered("resnet50_ddp", SIZE, f"job.environment.name='{name}'")["environment"] == name


def definition(settings: EnvironmentSettings) -> Environment:
    found = job_environment(settings)
    assert isinstance(found, Environment)
    return found


def test_an_image_and_packages_on_top(tmp_path: Path) -> None:
    (tmp_path / "conda.yaml").write_text("dependencies: [python=3.11]\n")
    found = definition(EnvironmentSettings(image="registry.io/mine:1", conda_file="conda.yaml"))
    assert (found.image, found.conda_file) == ("registry.io/mine:1", {"dependencies": ["python=3.11"]})


def test_a_folder_to_build(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "gpu.Dockerfile").touch()
    build: Any = definition(EnvironmentSettings(build="image", dockerfile="gpu.Dockerfile")).build
    assert (Path(build.path).name, build.dockerfile_path) == ("image", "gpu.Dockerfile")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (EnvironmentSettings(name="azureml:a:1", image="b"), "has name and image"),
        (EnvironmentSettings(name="pytorch:2"), "names no version"),
        (EnvironmentSettings(name="azureml:mine"), "azureml:NAME@latest"),
        (EnvironmentSettings(conda_file="a.yaml"), "put on top of an image"),
        (EnvironmentSettings(image="a", conda_file="a.yaml"), "no such file"),
        (EnvironmentSettings(build="nowhere"), "there is no Dockerfile in it"),
        (EnvironmentSettings(image="a", base_image="b"), "job.environment.image replaces"),
    ],
)
def test_environments_that_cannot_be(settings: EnvironmentSettings, words: str) -> None:
    with pytest.raises(JobError, match=words):
        job_environment(settings)


def test_the_shipped_one_is_the_same_folder_for_the_same_content(cache: Path) -> None:
    build: Any = definition(EnvironmentSettings()).build
    folder = Path(build.path)
    assert folder.is_relative_to(cache)
    names = {file.name for file in folder.iterdir()}
    assert names == {"Dockerfile", "conda.yaml", "constraints.txt", wheel_name()}
    assert "FROM mcr.microsoft.com/azureml/openmpi" in (folder / "Dockerfile").read_text()
    assert yaml.safe_load((folder / "conda.yaml").read_text())["dependencies"][0] == "python=3.11"
    base = "mcr.microsoft.com/azureml/curated/acpt-pytorch-2.8-cuda12.6:latest"
    other = build_folder(base)
    assert other != folder
    assert (
        "\nFROM mcr.microsoft.com/azureml/curated/acpt-pytorch-2.8-cuda12.6:latest\n"
        in (other / "Dockerfile").read_text()
    )
    build_folder.__globals__["_build_folder"].cache_clear()
    assert build_folder() == folder
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, other.name}, "nothing half made stays"


def test_a_folder_that_cannot_be_written_is_not_taken_for_one_that_is_there(cache: Path) -> None:
    folder = build_folder()
    shutil.rmtree(folder)
    folder.write_text("a file is in the way")
    build_folder.__globals__["_build_folder"].cache_clear()
    with pytest.raises(NotADirectoryError):
        build_folder()


def wheel_name() -> str:
    return f"azureml_strategy-{version('azureml-strategy')}-py3-none-any.whl"


def test_its_wheel_installs_and_answers(tmp_path: Path) -> None:
    wheel = shutil.copy(build_folder() / wheel_name(), tmp_path)
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), wheel], check=True)
    code = (
        "import sys; from importlib.metadata import distribution, entry_points\n"
        "import azureml_strategy; print(azureml_strategy.__file__)\n"
        "from azureml_strategy.cli import main; main(['recipes'])\n"
        "print(sorted(each.value for each in distribution('azureml-strategy').entry_points))"
    )
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(target)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith(f"{target}/azureml_strategy/__init__.py\n")
    assert "resnet50_imagenet" in done.stdout
    assert done.stdout.splitlines()[-1] == str(
        sorted(each.value for each in distribution("azureml-strategy").entry_points)
    )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "hydra_plugins/azureml_searchpath/__init__.py" in names
    assert "azureml_strategy/conf/cluster/nd96isr_h100_v5.yaml" in names
    assert "azureml_strategy/environments/Dockerfile" in names
    assert not [name for name in names if "__pycache__" in name or "direct_url" in name]


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
