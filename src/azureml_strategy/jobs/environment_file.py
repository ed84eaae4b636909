"""Makes a job's image of the user's requirements.txt, conda file, pyproject.toml or Dockerfile, with this package."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from azureml_strategy.jobs.dockerfiles import is_below, write_dockerfile_context
from azureml_strategy.jobs.image import (
    EXTRA,
    PACKAGE,
    PLACE,
    adding_lines,
    copy_file,
    keep_context,
    shipped_dockerfile,
    write_wheel,
)
from azureml_strategy.jobs.requirements import Requirements, read_lines, read_text, refuse_secret_lines, refuse_unfit
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.snapshot import list_snapshot

_PYTHONS = ("3.11", "3.12", "3.13")  # requires-python of this package
_SEARCHED = (
    *("requirements.txt", "environment.yml", "environment.yaml", "conda.yml", "conda.yaml", "pyproject.toml"),
    "Dockerfile",
)
_TESTED = "tested.txt"  # versions of what the user's file names without one
_USER = "user"  # the folder of the context that holds the user's files
_PYTORCH_INDEX = "https://download.pytorch.org/"  # has torch, but neither Lightning nor MLflow
_CONDA_PYTHON = re.compile(r"(?:\S+::)?python(?![\w-])\s*(.*)")
_CONDA_PIN = re.compile(r"(?:\S+::)?([\w.-]+)\s*={1,2}\s*([\w.]+)(?:=\S*)?")
_CONDA_NAMES = {"pytorch": "torch"}


def environment_kind(path: str) -> str:
    """What a file is, by its name and, for YAML, its content.

    Returns:
        `requirements`, `conda`, `pyproject` or `dockerfile`.

    Raises:
        JobError: the file is missing, or none of these.
    """
    if not os.path.isfile(path):
        raise JobError(f"job.environment.file is {path}, but there is no such file.")
    found = _kind(Path(path))
    if found is None:
        raise JobError(
            f"job.environment.file is {path}, which is neither requirements (*.txt), nor a conda file (*.yml with "
            "`dependencies:`), nor a pyproject.toml with a [project] table, nor a Dockerfile. A file of another kind: "
            "`pip list --format=freeze > requirements.txt`; our own image alone: job.environment.file=none."
        )
    return found


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    if name.startswith("dockerfile") or name.endswith("dockerfile"):
        return "dockerfile"
    if name == "pyproject.toml":
        return "pyproject" if {"project", "tool"} & _toml(path).keys() else None
    if name.endswith((".yml", ".yaml")):
        return "conda" if "dependencies" in _yaml(path) else None
    return "requirements" if name.endswith(".txt") else None


def find_environment_file(folders: Sequence[str]) -> str | None:
    """Find the file that describes the environment of a script.

    Args:
        folders: where to look, one after the other: the folder of the script, then that of the code.

    Returns:
        The first of these that exists: requirements.txt, environment.yml or .yaml, conda.yml or .yaml, pyproject.toml
        with a `[project]` table, Dockerfile; None without any.
    """
    for path in (Path(folder, name) for folder in folders for name in _SEARCHED if Path(folder, name).is_file()):
        # A pyproject.toml that was not asked for may hold the settings of tools alone.
        if "project" in _toml(path) if path.name == "pyproject.toml" else _kind(path) is not None:
            return str(path)
    return None


def environment_context(file: str, base_image: str | None = None, root: str | None = None) -> Path:
    """Write the build context of an image with what a file asks for, and with this package.

    Args:
        file: requirements, a conda file, a pyproject.toml or a Dockerfile.
        base_image: base image in place of that of our Dockerfile.
        root: the folder of code: files that the file refers to must lie in it. None is the current folder, or that of
            the file if it lies elsewhere.

    Returns:
        The folder, in the user's cache. The same content gives the same folder.

    Raises:
        JobError: the file cannot be used; see the message.
    """
    path = Path(os.path.abspath(file))
    kind = environment_kind(file)
    if kind == "dockerfile":
        return keep_context(partial(write_dockerfile_context, path))
    fill = {"requirements": _fill_requirements, "conda": _fill_conda, "pyproject": _fill_pyproject}[kind]
    return keep_context(partial(fill, path, _empty_requirements(path, root), base_image))


def pins_of_file(file: str, root: str | None = None) -> list[str]:
    """The tested versions that an image of a file gets, such as `torch==2.13.0`, if the file itself pins none.

    Only requirements and a pyproject.toml get any.

    Raises:
        JobError: the file cannot be used.
    """
    kind, path = environment_kind(file), Path(os.path.abspath(file))
    if kind not in ("requirements", "pyproject"):
        return []
    found = _empty_requirements(path, root)
    if kind == "requirements":
        found.read(path)
    else:
        found.read_all(read_lines(path.name, _dependencies(_project(path))), path.parent)
    return found.tested_pins()


def _dependencies(project: dict[str, Any]) -> str:
    """The dependencies of a `[project]` table as the text of a requirements file."""
    return "".join(f"{each}\n" for each in project.get("dependencies", []))


def _empty_requirements(path: Path, root: str | None) -> Requirements:
    """Requirements before a file is read. It may refer to files of the folder of code, or else of its own folder."""
    top = Path(os.path.abspath(root or os.curdir))
    return Requirements(root=top if path.is_relative_to(top) else path.parent, base=path.parent)


def _fill_requirements(path: Path, found: Requirements, base_image: str | None, folder: Path) -> None:
    found.read(path)
    _copy(found, folder)
    _write_pip(found, path.name, _own_python(), base_image, folder)


def _fill_pyproject(path: Path, found: Requirements, base_image: str | None, folder: Path) -> None:
    project = _project(path)
    python = _python_for(path, project.get("requires-python"))
    text = _dependencies(project)
    refuse_secret_lines(path.name, text)
    found.read_all(read_lines(path.name, text), path.parent)
    _copy(found, folder)
    written = folder / _USER / found.inside(path.parent, str(path)) / "requirements.txt"
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(text, encoding="utf-8")
    _write_pip(found, written.name, python, base_image, folder)


def _write_pip(found: Requirements, name: str, python: str, base_image: str | None, folder: Path) -> None:
    """Write the Dockerfile in which pip installs the user's requirements and this package."""
    refuse_unfit(found.packages)
    wheel = write_wheel(folder).name
    base = shipped_dockerfile(base_image).partition("COPY constraints.txt")[0]
    conda = {"channels": ["conda-forge", "nodefaults"], "dependencies": [f"python={python}", "pip"]}
    (folder / "conda.yaml").write_text(yaml.safe_dump(conda), encoding="utf-8")
    asked = f"pip install --no-cache-dir --requirement {shlex.quote(name)}"
    if (found.index or "").startswith(_PYTORCH_INDEX):
        asked += " --extra-index-url https://pypi.org/simple"
    tested = found.tested_pins()
    if tested:
        (folder / _TESTED).write_text("".join(f"{pin}\n" for pin in tested), encoding="utf-8")
        asked += f" --constraint {PLACE}/{_TESTED}"
    # One resolution finds versions that fit the user's file and this package. Where pip checks hashes, it refuses the
    # wheel, which has none; then the wheel is added afterwards.
    together = f'{asked} "{PLACE}/{wheel}[{EXTRA}]" \\\n    && azureml-strategy --version'
    lines = [
        f"COPY {_USER}/ ./{_USER}/",
        f"COPY {f'{_TESTED} ' if tested else ''}*.whl ./",
        f"RUN cd {_inside(found)} \\",
    ]
    lines += [f"    && {asked}", *adding_lines(wheel)] if found.hashed else [f"    && {together}"]
    (folder / "Dockerfile").write_text(base + "\n".join([*lines, ""]), encoding="utf-8")


def _inside(found: Requirements) -> str:
    """The folder in which pip runs, as a word of the image's shell."""
    return shlex.quote(os.path.normpath(f"{PLACE}/{_USER}/{found.inside(found.base, str(found.base))}"))


def _fill_conda(path: Path, found: Requirements, base_image: str | None, folder: Path) -> None:
    content = _yaml(path)
    refuse_secret_lines(path.name, read_text(path))
    dependencies = [each for each in content["dependencies"] or [] if isinstance(each, str)]
    asked = [line for each in content["dependencies"] or [] if isinstance(each, dict) for line in each.get("pip") or []]
    found.read_all(read_lines(f"{path.name}, pip", "".join(f"{line}\n" for line in asked)), path.parent)
    refuse_unfit(found.packages | _conda_pins(path, dependencies))
    _copy(found, folder)
    wheel = write_wheel(folder).name
    own = f"{PLACE}/{wheel}[{EXTRA}]"
    pip = [*asked, *([] if found.hashed else [own])]
    # The name and the prefix are those of the user's machine.
    written = {key: value for key, value in content.items() if key not in ("name", "prefix")}
    written["dependencies"] = [*dependencies, *_conda_additions(path, dependencies), *([{"pip": pip}] if pip else [])]
    place = folder / _USER / found.inside(path.parent, str(path)) / path.name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
    head = shipped_dockerfile(base_image).partition("COPY conda.yaml")[0]
    lines = [
        f"COPY {_USER}/ ./{_USER}/",
        "COPY *.whl ./",
        f"RUN cd {_inside(found)} \\",
        f"    && conda env create --prefix /opt/env --file {shlex.quote(path.name)} && conda clean --all --yes",
        "ENV PATH=/opt/env/bin:$PATH CONDA_DEFAULT_ENV=/opt/env",
        *(adding_lines(wheel) if found.hashed else ["RUN azureml-strategy --version"]),
    ]
    (folder / "Dockerfile").write_text(head + "\n".join([*lines, ""]), encoding="utf-8")


def _conda_additions(path: Path, dependencies: Iterable[str]) -> list[str]:
    """What the package needs from conda beside the user's list: a Python that fits, and pip."""
    wanted = [found[1].strip() for found in map(_CONDA_PYTHON.fullmatch, dependencies) if found]
    for text in wanted:
        pinned = re.match(r"={0,2}\s*(\d+\.\d+)", text)
        if pinned and pinned[1] not in _PYTHONS:
            raise JobError(
                f"{path} asks for python {text.lstrip('= ')}, but {PACKAGE} needs one of {', '.join(_PYTHONS)}. "
                "Change the line, or name an image that holds what you need: job.environment.image=..."
            )
        if re.match(r"[<>!~]", text):
            _python_for(path, text)
    python = "python>=3.11,<3.14" if wanted else f"python={_own_python()}"
    has_pip = any(re.fullmatch(r"(?:\S+::)?pip(?![\w-]).*", each) for each in dependencies)
    return [python, *([] if has_pip else ["pip"])]


def _conda_pins(path: Path, dependencies: Iterable[str]) -> dict[str, Requirement]:
    """The exact versions that a conda file asks for, as requirements."""
    pins = {}
    for each in dependencies:
        found = _CONDA_PIN.fullmatch(each)
        if found and not _CONDA_PYTHON.fullmatch(each):
            try:
                pin = Requirement(f"{_CONDA_NAMES.get(found[1], found[1])}=={found[2]}")
            except InvalidRequirement:
                continue
            # In conda's notation, =2.4 stands for 2.4.*, which may fit.
            if each.count("=") != 1 or found[2].count(".") > 1:
                pins[f"{path.name}: {each}"] = pin
    return pins


def _copy(found: Requirements, folder: Path) -> None:
    """Copy the files that pip needs into the context, at their paths below the root."""
    user = folder / _USER
    user.mkdir()
    for name, path in found.texts.items():
        copy_file(path, user / name)
    trees = {name for name in found.copied if (found.root / name).is_dir()}
    for name in found.copied - trees:
        copy_file(found.root / name, user / name)
    files = list_snapshot(str(found.root)).files if trees else ()
    for name in (name for name in files if is_below(name, trees)):
        copy_file(found.root / name, user / name)
    missing = [tree for tree in trees if not (user / tree).is_dir()]
    if missing:
        raise JobError(
            f"{found.root / missing[0]} is to be installed, but all of it is left out by .gitignore's rules."
        )


def _own_python() -> str:
    """The Python that submits, under which the user chose the versions."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _python_for(path: Path, wanted: str | None) -> str:
    """The version of Python that a project allows, preferably the one that submits.

    Raises:
        JobError: it allows none that this package runs on.
    """
    try:
        allowed = SpecifierSet(wanted or "")
    except InvalidSpecifier as error:
        raise JobError(f"{path} asks for Python {wanted!r}, which is no range of versions.") from error
    for each in (_own_python(), *_PYTHONS):
        if any(allowed.contains(f"{each}.{patch}") for patch in range(30)):
            return each
    raise JobError(
        f"{path} asks for Python {wanted}, but {PACKAGE} needs one of {', '.join(_PYTHONS)}. Change it, or name an "
        "image that holds what you need: job.environment.image=..."
    )


def _project(path: Path) -> dict[str, Any]:
    """The `[project]` table of a pyproject.toml.

    Raises:
        JobError: there is none, or its dependencies are not in it.
    """
    content = _toml(path)
    project = content.get("project")
    if not isinstance(project, dict) or "dependencies" in project.get("dynamic", []):
        tool = "poetry export" if "poetry" in content.get("tool", {}) else "pip list --format=freeze"
        raise JobError(
            f"{path} does not say its dependencies in project.dependencies. Write them into a requirements.txt, as by "
            f"`{tool} > requirements.txt`, and name that: job.environment.file=requirements.txt. Our own image alone: "
            "job.environment.file=none."
        )
    return project


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{path} cannot be read: {error}.") from error


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise JobError(f"{path} cannot be read: {error}.") from error
    return content if isinstance(content, dict) else {}
