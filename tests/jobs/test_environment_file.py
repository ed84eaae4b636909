from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from azure.ai.ml.entities import Environment
from tests.jobs.rendering import SIZE, cache, own_recipe, rendered

from azureml_strategy.jobs.environment_file import environment_context, environment_kind, find_environment_file
from azureml_strategy.jobs.environments import describe_environment, job_environment
from azureml_strategy.jobs.image import build_folder
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.settings import EnvironmentSettings

__all__ = ["cache"]  # a fixture

SHIPPED = Path(__file__).parents[2] / "environments"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of code, which is the current one."""
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def context(file: str, text: str, base_image: str | None = None) -> dict[str, str]:
    """The texts of the build context that a file of this text gives; `WHEEL` stands for the wheel's name."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text)
    folder = environment_context(file, base_image)
    files = [path for path in folder.rglob("*") if path.is_file()]
    (wheel,) = (path.name for path in files if path.parent == folder and path.suffix == ".whl")
    names = {path.relative_to(folder).as_posix(): path for path in files if path.name != wheel}
    return {name: path.read_text().replace(wheel, "WHEEL") for name, path in names.items()}


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("requirements.txt", "", "requirements"),
        ("needs.txt", "", "requirements"),
        ("environment.yml", "dependencies: []", "conda"),
        ("mine.yaml", "dependencies:\n- numpy", "conda"),
        ("pyproject.toml", "[project]\nname = 'a'", "pyproject"),
        ("Dockerfile", "", "dockerfile"),
        ("gpu.Dockerfile", "", "dockerfile"),
        ("Dockerfile.gpu", "", "dockerfile"),
        ("environment.yml", "image: ubuntu", None),
        ("broken.yml", "a: [", None),
        ("pyproject.toml", "[", None),
        ("pyproject.toml", "", None),
        ("Pipfile.lock", "", None),
    ],
)
def test_kinds(code: Path, name: str, text: str, kind: str | None) -> None:
    Path(name).write_text(text)
    if kind:
        assert environment_kind(name) == kind
    else:
        with pytest.raises(JobError, match=r"cannot be read|which is neither .*job\.environment\.file=none"):
            environment_kind(name)


def test_the_first_that_describes_an_environment_is_found(code: Path) -> None:
    folders = [str(code / "sub"), str(code)]
    (code / "sub").mkdir()
    assert find_environment_file(folders) is None
    (code / "sub" / "pyproject.toml").write_text("[tool.ruff]\n")
    (code / "sub" / "environment.yml").write_text("image: ubuntu\n")
    assert find_environment_file(folders) is None
    expected = []
    for name in ("Dockerfile", "pyproject.toml", "conda.yaml", "conda.yml", "environment.yaml", "requirements.txt"):
        (code / name).write_text("[project]\nname = 'a'" if name.endswith("toml") else "dependencies: [a]")
        expected.append(find_environment_file(folders) == str(code / name))
    assert all(expected)
    (code / "sub" / "Dockerfile").touch()
    assert find_environment_file(folders) == str(code / "sub" / "Dockerfile")


def test_requirements_and_the_package_in_one_resolution(code: Path) -> None:
    (code / "lib").mkdir()
    (code / "lib" / "a.py").write_text("a = 1")
    (code / "lib" / ".env").write_text("b")
    (code / "env").mkdir()
    (code / "env" / "more.txt").write_text("no-such-package\n-e ../lib\n")
    found = context("env/my needs.txt", "numpy<1\n-r more.txt\n")
    names = {"Dockerfile", "conda.yaml", "user/env/my needs.txt", "user/env/more.txt", "user/lib/a.py"}
    assert found.keys() == names
    assert found["Dockerfile"].splitlines()[-5:] == [
        "COPY user/ ./user/",
        "COPY *.whl ./",
        "RUN cd /opt/azureml-strategy/user/env \\",
        "    && pip install --no-cache-dir --requirement 'my needs.txt' \"/opt/azureml-strategy/WHEEL[tracking]\" \\",
        "    && azureml-strategy --version",
    ]
    assert "FROM mcr.microsoft.com/azureml/openmpi" in found["Dockerfile"]
    assert "constraints" not in found["Dockerfile"]
    assert yaml.safe_load(found["conda.yaml"])["dependencies"] == [f"python={HERE}", "pip"]


def test_hashes_are_checked_of_the_users_file_alone(code: Path) -> None:
    found = context("requirements.txt", f"six==1.17.0 --hash=sha256:{'a' * 64}\n")
    first, second = found["Dockerfile"].split("RUN cd ")[1].split("RUN python -m pip uninstall")
    assert "--requirement requirements.txt\n" in first
    assert "WHEEL" not in first
    assert '--constraint /opt/azureml-strategy/installed.txt "/opt/azureml-strategy/WHEEL[tracking]"' in second


def test_pytorchs_index_needs_pypi_beside_it(code: Path) -> None:
    found = context("requirements.txt", "--index-url https://download.pytorch.org/whl/cu126\ntorch\n")
    assert "--requirement requirements.txt --extra-index-url https://pypi.org/simple" in found["Dockerfile"]
    found = context("requirements.txt", "--index-url https://mirror.example.com/simple\ntorch\n")
    assert "pypi.org" not in found["Dockerfile"]


def test_a_conda_file(code: Path) -> None:
    (code / "more.txt").write_text("einops\n")
    content: dict[str, Any] = {"name": "mine", "prefix": "/home/me/mine", "channels": ["conda-forge"]}
    content["dependencies"] = ["python>=3.10", "numpy=1.26", {"pip": ["rich", "-r more.txt"]}]
    found = context("environment.yml", yaml.safe_dump(content))
    assert found.keys() == {"Dockerfile", "user/environment.yml", "user/more.txt"}
    assert yaml.safe_load(found["user/environment.yml"]) == {
        "channels": ["conda-forge"],
        "dependencies": [
            *("python>=3.10", "numpy=1.26", "python>=3.11,<3.14", "pip"),
            {"pip": ["rich", "-r more.txt", "/opt/azureml-strategy/WHEEL[tracking]"]},
        ],
    }
    assert found["Dockerfile"].splitlines()[-4:] == [
        "RUN cd /opt/azureml-strategy/user \\",
        "    && conda env create --prefix /opt/env --file environment.yml && conda clean --all --yes",
        "ENV PATH=/opt/env/bin:$PATH CONDA_DEFAULT_ENV=/opt/env",
        "RUN azureml-strategy --version",
    ]
    alone = yaml.safe_load(context("conda.yml", "dependencies: [numpy, pip]")["user/conda.yml"])
    assert alone["dependencies"][:3] == ["numpy", "pip", f"python={HERE}"]


def test_a_pyproject(code: Path) -> None:
    needs = "requires-python = '>=3.12,<3.13'\ndependencies = ['numpy>=1', 'rich; os_name == \"nt\"']\n"
    found = context("pyproject.toml", f"[project]\nname = 'a'\n{needs}")
    assert found["user/requirements.txt"] == 'numpy>=1\nrich; os_name == "nt"\n'
    assert yaml.safe_load(found["conda.yaml"])["dependencies"][0] == "python=3.12"
    assert "--requirement requirements.txt" in found["Dockerfile"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("environment.yml", "dependencies: [python=3.9]", "python 3.9, but azureml-strategy needs one of 3.11"),
        ("environment.yml", "dependencies: [python 3.8.*]", "python 3.8"),
        ("environment.yml", "dependencies: ['python>=3.8,<3.11']", "Python >=3.8,<3.11"),
        ("environment.yml", "dependencies: [pytorch=2.4.1]", "environment.yml: pytorch=2.4.1: .* needs torch"),
        ("environment.yml", "dependencies: [{pip: ['torch==2.4.0']}]", "pip, line 1: torch==2.4.0"),
        ("environment.yml", "dependencies: [a]\nvariables: {WANDB_API_KEY: hunter2hunter2}", "line 2, looks like"),
        ("requirements.txt", "torch==2.4.0", "line 1: torch==2.4.0: .* needs torch>="),
        ("pyproject.toml", "[project]\nname='a'\nrequires-python='<3.11'", "asks for Python <3.11"),
        ("pyproject.toml", "[project]\nname='a'\ndynamic=['dependencies']", "pip list --format=freeze > requirements"),
        ("pyproject.toml", "[tool.poetry]\nname='a'", "poetry export > requirements.txt"),
    ],
)
def test_what_is_refused(code: Path, cache: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(JobError, match=words) as refused:
        context(name, text)
    assert "hunter2" not in str(refused.value)
    folder = cache / "azureml_strategy" / "environments"
    assert not folder.exists() or not list(folder.iterdir())


def test_the_same_content_is_the_same_image(code: Path, tmp_path: Path) -> None:
    def made(**settings: Any) -> Environment:
        found = job_environment(EnvironmentSettings(**settings))
        assert isinstance(found, Environment)
        return found

    Path("requirements.txt").write_text("einops\n")
    (tmp_path / "requirements.txt").write_text("einops\n")
    first, second = made(file="requirements.txt"), made(file=str(tmp_path / "requirements.txt"))
    assert str(first.build.path) == str(second.build.path)
    Path("requirements.txt").write_text("einops==0.8.0\n")
    others = [made(file="requirements.txt"), made(file="requirements.txt", base_image="mine:1"), made(file="none")]
    assert len({str(each.build.path) for each in [first, *others]}) == 4
    assert Path(str(others[-1].build.path)) == build_folder()


def test_a_job_names_the_context(code: Path) -> None:
    from azure.ai.ml import load_job

    Path("requirements.txt").write_text("einops\n")
    recipe = own_recipe("mine.yaml", "job:\n  environment:\n    file: requirements.txt")
    first, second = rendered(recipe, SIZE), rendered(recipe, SIZE)
    assert first["environment"] == second["environment"]
    assert Path(first["environment"]["build"]["path"], "user", "requirements.txt").read_text() == "einops\n"
    Path("job.yaml").write_text(yaml.safe_dump(first))
    loaded = [load_job("job.yaml").environment for _ in range(2)]
    assert len({(each.name, each.version) for each in loaded}) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (EnvironmentSettings(file="gone.txt"), "no such file"),
        (EnvironmentSettings(file="requirements.txt", image="a"), "has image and file"),
        (EnvironmentSettings(file="none", name="azureml:a:1"), "has name and file"),
        (EnvironmentSettings(file="Dockerfile", base_image="b"), "job.environment.file replaces"),
    ],
)
def test_settings_that_contradict(code: Path, settings: EnvironmentSettings, words: str) -> None:
    Path("Dockerfile").touch()
    with pytest.raises(JobError, match=words):
        job_environment(settings)


def test_nodes_that_our_image_does_not_run_on(code: Path) -> None:
    Path("Dockerfile").write_text("FROM rocm/pytorch\n")
    Path("requirements.txt").touch()
    own_recipe("mine.yaml")
    rendered("mine.yaml", "cluster=nd96isr_mi300x_v5", "job.environment.file=Dockerfile")
    with pytest.raises(JobError, match="AMD GPUs"):
        rendered("mine.yaml", "cluster=nd96isr_mi300x_v5", "job.environment.file=requirements.txt")


def test_it_is_told_in_a_line(code: Path) -> None:
    Path("requirements.txt").touch()
    Path("Dockerfile").touch()
    base = "openmpi5.0-cuda12.6-ubuntu24.04:20260621.v1"
    for settings, text in (
        (EnvironmentSettings(file="requirements.txt"), f"requirements.txt and azureml-strategy 0.1.0, on {base}"),
        (EnvironmentSettings(file="Dockerfile"), "Dockerfile and azureml-strategy 0.1.0"),
        (EnvironmentSettings(base_image="a/b:2"), "azureml-strategy 0.1.0 and its tested versions, on b:2"),
        (EnvironmentSettings(), f"azureml-strategy 0.1.0 and its tested versions, on {base}"),
        (EnvironmentSettings(image="a:1", conda_file="c.yml"), "a:1 and c.yml"),
    ):
        assert describe_environment(settings) == f"environment: {text}"


@pytest.mark.parametrize(
    ("text", "pinned"),
    [
        ("torch>=2.8\nlightning\nno-such-package\n", ["lightning", "torch"]),
        ("torch>=2.8,<2.9\nlightning\n", ["lightning"]),  # the tested one is not allowed
        ("torch==2.13.0\nlightning\n", []),
        ("torch==2.9.*\nlightning\n", []),
        ("-c own.txt\nlightning\n", []),
        ("--index-url https://download.pytorch.org/whl/cu126\ntorch\n", []),
        ("torch @ https://example.com/torch.whl\n", []),
    ],
)
def test_what_a_file_does_not_pin_is_the_tested_version(code: Path, text: str, pinned: list[str]) -> None:
    Path("own.txt").write_text("torch>=2.8\n")
    found = context("requirements.txt", text)
    lines = found.get("tested.txt", "").splitlines()
    tested = (SHIPPED / "constraints.txt").read_text().splitlines()
    assert [line.partition("==")[0] for line in lines] == pinned
    assert set(lines) <= set(tested)
    assert ("--constraint /opt/azureml-strategy/tested.txt" in found["Dockerfile"]) == bool(pinned)
    assert ("COPY tested.txt *.whl ./" in found["Dockerfile"]) == bool(pinned)
    told = describe_environment(EnvironmentSettings(file="requirements.txt"))
    assert told.partition("does not pin: ")[2].split() == lines


def test_the_base_image_is_the_same_in_a_year() -> None:
    for name in ("Dockerfile", "Dockerfile.serving"):
        (base,) = [line for line in (SHIPPED / name).read_text().splitlines() if line.startswith("FROM ")]
        assert re.search(r":\d{8}\.v\d+$", base)


def test_the_command_of_the_image_is_pips(code: Path, tmp_path: Path) -> None:
    """pip reads the very command, with everything that it names in the context, and takes the wheel."""
    Path("requirements.txt").write_text("-r sub/more.txt\n./lib\n")
    for name, text in {
        "sub/more.txt": "no-such-package\n",
        "lib/pyproject.toml": "[project]\nname='l'\nversion='1'\n",
    }.items():
        Path(name).parent.mkdir()
        Path(name).write_text(text)
    place = tmp_path / "image"
    shutil.copytree(environment_context("requirements.txt"), place)
    run = (
        (place / "Dockerfile")
        .read_text()
        .split("RUN cd ")[1]
        .replace("\\\n", " ")
        .replace("/opt/azureml-strategy", str(place))
    )
    folder, install, _ = run.split("&&")
    dry = [
        sys.executable,
        "-m",
        "pip",
        *shlex.split(install)[1:],
        "--dry-run",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    done = subprocess.run([*dry, "--ignore-installed"], cwd=folder.strip(), capture_output=True, text=True)
    # Without an index the only thing that pip does not find is the package from it.
    assert "No matching distribution found for no-such-package" in done.stderr, done.stderr
    (place / "user" / "sub" / "more.txt").write_text("")
    done = subprocess.run([*dry, "--ignore-installed"], cwd=folder.strip(), capture_output=True, text=True)
    assert "Would install azureml-strategy-0.1.0 l-1" in done.stdout, done.stderr
