"""Defines, builds and checks the environment of a job: a given image, or one that Azure ML builds with this package."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import azureml_strategy
from azureml_strategy.jobs.client import quiet_sdk
from azureml_strategy.jobs.inputs import short_reference
from azureml_strategy.jobs.service_errors import JobError, service_errors
from azureml_strategy.jobs.settings import EnvironmentSettings
from azureml_strategy.network.vm_sizes import VMSize

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Environment

_NAME = "azureml-strategy"
# The earliest date of the zip format. With a constant date, the same files give the same archive and the same image.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_wheel(folder: Path) -> Path:
    """Write the wheel.

    Args:
        folder: folder that receives it.

    Returns:
        Path of the wheel.
    """
    installed = distribution(_NAME)
    stem = f"{_NAME.replace('-', '_')}-{installed.version}"
    contents = dict(_sources())
    for name, text in _description(
        installed.read_text("METADATA") or "", installed.read_text("entry_points.txt") or ""
    ):
        contents[f"{stem}.dist-info/{name}"] = text.encode()
    contents[f"{stem}.dist-info/RECORD"] = _record(contents, f"{stem}.dist-info/RECORD").encode()
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, contents[name], zipfile.ZIP_DEFLATED)
    return path


def _sources() -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each file of the package and its Hydra plugins, installed side by side."""
    root = Path(azureml_strategy.__file__).parents[1]
    for folder in (root / "azureml_strategy", *root.glob("hydra_plugins/azureml_*")):
        for parent, folders, names in os.walk(folder, followlinks=True):  # an editable install has symbolic links
            folders[:] = [name for name in folders if name != "__pycache__"]
            for path in (Path(parent, name) for name in names):
                yield path.relative_to(root).as_posix(), path.read_bytes()


def _description(metadata: str, entry_points: str) -> Iterator[tuple[str, str]]:
    # Leave out the long description, the README: a changed word in it must not cause a new image.
    headers = metadata.partition("\n\n")[0] + "\n"
    yield "METADATA", "".join(line for line in headers.splitlines(True) if not line.startswith("Description-Content"))
    yield "entry_points.txt", entry_points
    yield "WHEEL", f"Wheel-Version: 1.0\nGenerator: {_NAME}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def _record(contents: dict[str, bytes], own_path: str) -> str:
    lines = [f"{name},sha256={_digest(contents[name])},{len(contents[name])}" for name in sorted(contents)]
    return "\n".join([*lines, f"{own_path},,", ""])


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


_SHIPPED = ("Dockerfile", "conda.yaml", "constraints.txt")
_REFERENCE = re.compile(r"azureml:(//)?\S+[:@/]\S+")

_CHECK = "azureml-strategy --version"
_EXPERIMENT = "environment-check"


def job_environment(settings: EnvironmentSettings) -> Environment | str:
    """The environment of a job.

    Args:
        settings: `job.environment`.

    Returns:
        A reference to a registered or curated environment as text, else the definition of an anonymous one. Azure ML
        builds that once, and uses the same image for the same definition again.

    Raises:
        JobError: the settings contradict one another, or name a file that does not exist.
    """
    from azure.ai.ml.entities import BuildContext, Environment

    _check(settings)
    if settings.name:
        return short_reference(settings.name)
    if settings.image:
        return Environment(image=settings.image, conda_file=settings.conda_file)
    if settings.build:
        return Environment(build=BuildContext(path=settings.build, dockerfile_path=settings.dockerfile))
    return shipped_environment(settings.base_image)


def check_image(settings: EnvironmentSettings, size: VMSize | None) -> None:
    """Refuse the shipped image, which has PyTorch for CUDA and x86-64, on nodes that cannot run it.

    Raises:
        JobError: the nodes have AMD GPUs or NVIDIA Grace CPUs, and the settings name no other image.
    """
    if size is None or settings.name or settings.image or settings.build:
        return
    arm = (size.gpu_model or "").startswith("GB")  # Grace Blackwell: nd-gb200-v6-series.md, nd-gb300-v6-series.md
    if arm or size.accelerator == "amd":
        needed = "Arm CPUs, and needs an image for linux/arm64" if arm else "AMD GPUs, and needs PyTorch for ROCm"
        raise JobError(
            f"{size.name} has {needed}; our own image is for x86-64 and CUDA. Name one that holds azureml-strategy: "
            "job.environment.image=..., job.environment.build=... or job.environment.name=..."
        )


def shipped_environment(base_image: str | None = None) -> Environment:
    """The shipped environment: this package's Dockerfile, with the package as it is installed on this machine.

    Args:
        base_image: base image in place of the Dockerfile's own.
    """
    from azure.ai.ml.entities import BuildContext, Environment

    return Environment(build=BuildContext(path=str(build_folder(base_image)), dockerfile_path="Dockerfile"))


def build_folder(base_image: str | None = None) -> Path:
    """Write the build context of the image to a folder in the user's cache. The same content gives the same folder."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return _written(caches / "azureml_strategy" / "environments", base_image)


@functools.cache  # a sweep renders many jobs, and the package does not change meanwhile
def _written(cache: Path, base_image: str | None) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as new:
        written = Path(new) / "context"
        written.mkdir()
        for name in _SHIPPED:
            (written / name).write_bytes(files("azureml_strategy.environments").joinpath(name).read_bytes())
        if base_image:
            dockerfile = written / "Dockerfile"
            text = re.sub(r"(?m)^FROM .*$", f"FROM {base_image}", dockerfile.read_text(encoding="utf-8"))
            dockerfile.write_text(text, encoding="utf-8")
        write_wheel(written)
        folder = cache / _content(written)
        # The rename is atomic: a folder of this name is always complete. It fails if another process was first.
        try:
            written.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _content(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _check(settings: EnvironmentSettings) -> None:
    given = [name for name in ("name", "image", "build") if getattr(settings, name)]
    if len(given) > 1:
        raise JobError(f"job.environment has {' and '.join(given)}, but a job runs in one environment. Keep one.")
    if settings.name and not _REFERENCE.fullmatch(settings.name):
        raise JobError(
            f"job.environment.name is {settings.name!r}, which names no version. Write azureml:NAME@latest, "
            "azureml:NAME:VERSION or azureml://registries/azureml/environments/NAME/labels/latest; a container image "
            "belongs into job.environment.image."
        )
    if settings.conda_file and not settings.image:
        raise JobError("job.environment.conda_file is put on top of an image. Name one: job.environment.image=...")
    if settings.base_image and given:
        raise JobError(
            f"job.environment.base_image is the base of our own Dockerfile, which job.environment.{given[0]} replaces. "
            "Keep one."
        )
    _check_files(settings)


def _check_files(settings: EnvironmentSettings) -> None:
    if settings.conda_file and not Path(settings.conda_file).is_file():
        raise JobError(f"job.environment.conda_file is {settings.conda_file}, but there is no such file.")
    if settings.build and not Path(settings.build, settings.dockerfile).is_file():
        raise JobError(
            f"job.environment.build is {settings.build}, but there is no {settings.dockerfile} in it. Another name is "
            "given by job.environment.dockerfile."
        )


def render_environment(settings: EnvironmentSettings, name: str, version: str | None = None) -> Environment:
    """Describe the environment as azure-ai-ml's entity, without a request to Azure.

    Args:
        settings: content of the environment, as in `job.environment`. Empty settings use this package's Dockerfile.
        name: name to register.
        version: version to register. None takes the next number.

    Raises:
        JobError: the settings contradict one another, name a missing file, or name a registered environment.
    """
    quiet_sdk()
    from azure.ai.ml.entities import Environment

    made = job_environment(settings)
    if isinstance(made, str):
        raise JobError(f"{made} is registered already, so that there is nothing to build.")
    return Environment(name=name, version=version, image=made.image, conda_file=made.conda_file, build=made.build)


def build_environment(client: MLClient, environment: Environment) -> Environment:
    """Upload the build context and register the environment.

    Azure ML builds the image in the workspace's registry when the environment is registered or first used.

    Raises:
        ServiceError: the user has no permission, or the version exists with other content.
    """
    with service_errors():
        made: Environment = client.environments.create_or_update(environment)
    return made


def check_environment(client: MLClient, environment: Environment, cluster: str | None) -> str:
    """Submit a job of a few seconds in the environment, so that its image is built before a cluster waits for it.

    Args:
        client: client of the workspace.
        environment: environment that `build_environment` returned.
        cluster: name of the cluster to run on. None is serverless compute.

    Returns:
        The job's name.

    Raises:
        ServiceError: Azure refused the job.
    """
    from azure.ai.ml import command

    with service_errors():
        job = command(
            name=f"environment-{uuid.uuid4().hex[:12]}",
            display_name=f"{environment.name}:{environment.version}",
            experiment_name=_EXPERIMENT,
            command=_CHECK,
            environment=f"azureml:{environment.name}:{environment.version}",
            compute=cluster,
        )
        return str(client.jobs.create_or_update(job).name)
