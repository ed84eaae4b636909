"""What is in the wheel, and that it works alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tests.versions import PYTHONS, RESOLUTIONS, read_results, table

ROOT = Path(__file__).parents[1]
# What a build reads.
SOURCES = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "CHANGELOG.md",
    "SECURITY.md",
    "README.md",
    "LICENSE",
    "src",
    "conf",
    "recipes",
    "environments",
    "project",
    "constraints.txt",
    "tests",
    "benchmarks",
)
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


MOMENT = 1_700_000_000
NO_INDEX = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads: setuptools writes beside the sources."""
    copy = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the tree."""
    out = tmp_path_factory.mktemp("dist")
    pip(*NO_INDEX, str(out), str(tree))
    (built,) = out.glob("*.whl")
    return built


def pip(*arguments: str) -> None:
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(MOMENT)}
    done = subprocess.run([*PIP, *arguments], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def shipped(folder: Path, pattern: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob(pattern) if "__pycache__" not in path.parts}


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {f"azureml_strategy/{name}" for name in shipped(ROOT / "src" / "azureml_strategy", "*.py")}
    package |= {f"azureml_strategy/{name}" for name in shipped(ROOT / "src" / "azureml_strategy", "*.toml")}
    package |= {f"azureml_strategy/{name}" for name in shipped(ROOT / "src" / "azureml_strategy", "*.html")}
    for folder in ("conf", "recipes"):
        for pattern in ("*.yaml", "*.py"):
            package |= {f"azureml_strategy/{folder}/{name}" for name in shipped(ROOT / folder, pattern)}
    package |= {f"azureml_strategy/project/{file.name}" for file in (ROOT / "project").iterdir() if file.is_file()}
    package |= {f"azureml_strategy/environments/{file.name}" for file in (ROOT / "environments").glob("[!_]*")}
    package |= {f"hydra_plugins/azureml_{name}/__init__.py" for name in ("searchpath", "launcher")}
    assert names == package | {"azureml_strategy/py.typed", "azureml_strategy/environments/__init__.py"}


def test_the_links_of_readme_hold_on_pypi(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        shown = archive.read(metadata).decode()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = f"{project['urls']['Source']}/blob/v{project['version']}/"
    links = re.findall(r"\]\(([^)#]+)", shown)
    ours = [link.removeprefix(files) for link in links if link.startswith(files)]
    assert len(ours) > 40
    assert [link for link in ours if not (ROOT / link).is_file()] == []
    assert [link for link in links if "://" not in link] == []


def test_the_source_archive_tells_nothing_of_its_builder_and_makes_the_same_wheel(
    tree: Path, wheel: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", str(tmp_path), str(tree)]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(MOMENT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        members = archive.getmembers()
    assert {(each.mtime, each.uid, each.gid, each.uname, each.gname) for each in members} == {(MOMENT, 0, 0, "", "")}
    assert {each.mode for each in members} == {0o644, 0o755}
    assert all(each.isfile() or each.isdir() for each in members), "the folders that are links here are folders there"
    assert int.from_bytes(packed.read_bytes()[4:8], "little") == MOMENT, "the head of gzip"
    top = {each.name.split("/")[1] for each in members if "/" in each.name}
    assert top >= {"pyproject.toml", "setup.py", "LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "src"}
    assert "tests" not in top
    pip(*NO_INDEX, str(tmp_path), str(packed))
    assert checksums(tmp_path / wheel.name) == checksums(wheel)


def checksums(wheel: Path) -> list[tuple[str, int, tuple[int, ...]]]:
    """Of each file, in the wheel's order: byte for byte the wheels are alike where both trees have the same rights."""
    with zipfile.ZipFile(wheel) as archive:
        return [(each.filename, each.CRC, each.date_time) for each in archive.infolist()]


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
        "lightning.fabric.callbacks_factory azureml_strategy azureml_strategy.plugin:fabric_callbacks",
        "lightning.pytorch.callbacks_factory azureml_strategy azureml_strategy.plugin:job_callbacks",
        "pytorch_lightning.callbacks_factory azureml_strategy azureml_strategy.plugin:pytorch_lightning_callbacks",
        "torch.backends azureml_strategy azureml_strategy.plugin:register_when_lightning_is_imported",
    ]
    assert files("azureml_strategy").joinpath("py.typed").is_file()
    for folder in ("conf", "recipes"):
        here = {str(path) for path in shipped(ROOT / folder, "*.yaml")}
        installed = files(f"azureml_strategy.{folder}")
        assert here
        assert all(installed.joinpath(name).is_file() for name in here)


def bounds() -> dict[str, SpecifierSet]:
    """What pyproject.toml allows of each package, the extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    return {each.name: each.specifier for each in map(Requirement, asked)}


def lower(specifiers: SpecifierSet) -> Version:
    (found,) = (Version(each.version) for each in specifiers if each.operator == ">=")
    return found


def test_the_bounds_are_what_was_tested() -> None:
    """By `make test-versions`, which wrote the file: the oldest and the newest on each Python, and all passed."""
    cases = read_results()
    assert {case.name for case in cases} == {f"{only}-{python}" for only in RESOLUTIONS for python in PYTHONS}
    assert [case.name for case in cases if not case.passed] == []
    assert {case.only for case in cases if not case.quick} == set(RESOLUTIONS)
    (lowest,) = (case.versions for case in cases if case.name == "lowest-3.11")
    allowed = bounds()
    for name in lowest.keys() - {"python"}:
        assert lower(allowed[name]) == Version(lowest[name]), name
    for case in cases:
        assert all(allowed[name].contains(case.versions[name]) for name in lowest.keys() - {"python"}), case


def test_the_page_shows_what_was_tested() -> None:
    assert "\n".join(table(read_results())) in (ROOT / "docs" / "versions.md").read_text()


def test_the_oldest_versions_of_the_quick_check_are_those_that_are_allowed() -> None:
    lines = (ROOT / "tests" / "oldest.txt").read_text().splitlines()
    allowed = bounds()
    for each in map(Requirement, (line for line in lines if line[0] != "#")):
        if each.name not in ("pytorch-lightning", "sqlalchemy"):  # the same release; what such an MLflow needs
            assert str(each.specifier).removeprefix("==") in (
                str(lower(allowed[each.name])),
                f"{lower(allowed[each.name])}.0",
            )


# Run by every interpreter that starts with its folder on the path: what the extras bring is not found, nor what only
# the whole of MLflow needs, as if it were not installed.
WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import DistributionFinder

MODULES = {
    *("azure", "azureml", "deepspeed", "hydra", "omegaconf", "matplotlib", "PIL", "sklearn", "scipy", "tokenizers"),
    *("transformers", "pandas", "flask", "graphene", "docker", "pyarrow", "skops", "gunicorn", "huey"),
}
PACKAGES = MODULES | {"azureml-mlflow", "azure-ai-ml", "hydra-core", "pillow", "scikit-learn"}


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MODULES else PathFinder.find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, context=DistributionFinder.Context()):
        return (each for each in PathFinder.find_distributions(context) if each.metadata["Name"] not in PACKAGES)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
# Tracked training with checkpoints, by what the package needs without an extra; then, what does need one.
SCRIPT = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import azureml_strategy.data
from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.tracking import JobMLFlowLogger, RunReport, ThroughputCallback


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


trainer = Trainer(
    strategy="azureml_ddp",
    accelerator="cpu",
    max_epochs=1,
    log_every_n_steps=1,
    enable_progress_bar=False,
    logger=JobMLFlowLogger(),
    callbacks=[JobCheckpoint(), ThroughputCallback(warmup_steps=1), RunReport()],
)
trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(16, 4)), 2))
print("processes:", trainer.world_size)
for use in (
    lambda: Trainer(strategy="azureml_deepspeed_pipeline", accelerator="cpu"),
    lambda: azureml_strategy.data.DigitsDataModule,
):
    try:
        use()
    except ModuleNotFoundError as error:
        print(error)
"""


@pytest.fixture
def without_extras(tmp_path: Path) -> dict[str, str]:
    """Variables by which the packages of the extras are not found."""
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "sitecustomize.py").write_text(WITHOUT_EXTRAS)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "absent")}


def command_line(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "azureml_strategy.cli", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_what_needs_no_extra_works_and_what_does_says_which(
    without_extras: dict[str, str], tmp_path: Path, nodes: int
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command_line(without_extras, "emulate", "--nodes", str(nodes), "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"processes: {nodes}" in done.stdout
    metrics = MlflowClient("sqlite:///mlflow.db").search_runs(["1"])[0].data.metrics
    assert {"loss", "summary/samples_per_second"} <= metrics.keys()
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))
    for name, missing, extra in (
        ("PipelineStrategy", "deepspeed", "deepspeed"),
        ("DigitsDataModule", "PIL", "data"),
    ):
        said = f"{name} cannot be imported: {missing} is not installed here. Type: pip install -c constraints.txt "
        assert f"{said}'.[{extra}]' in a clone of azureml-strategy\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("train", "resnet50_ddp"), "recipes"),
        (("submit", "resnet50_ddp", "--dry-run"), "azure"),
        (("jobs", "list"), "azure"),
    ],
)
def test_a_missing_extra_is_one_sentence(
    without_extras: dict[str, str], arguments: tuple[str, ...], extra: str
) -> None:
    done = command_line(without_extras, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"Type: pip install -c constraints.txt '.[{extra}]' in a clone of azureml-strategy")
