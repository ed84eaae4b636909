"""Defines, builds and checks the environment of a job: a given image, or one that Azure ML builds with this package."""

from __future__ import annotations

import os
import re
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from azureml_strategy.jobs.client import quiet_sdk
from azureml_strategy.jobs.environment_file import environment_context, environment_kind, pins_of_file
from azureml_strategy.jobs.image import PACKAGE, base_of, build_folder, shipped_dockerfile
from azureml_strategy.jobs.inputs import short_reference
from azureml_strategy.jobs.service_errors import JobError, service_errors
from azureml_strategy.jobs.settings import EnvironmentSettings
from azureml_strategy.network.vm_sizes import VMSize

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Environment

_REFERENCE = re.compile(r"azureml:(//)?\S+[:@/]\S+")
OWN_IMAGE = "none"  # as job.environment.file: no file of the user's


def job_environment(settings: EnvironmentSettings, root: str | None = None) -> Environment | str:
    """The environment of a job.

    Args:
        settings: `job.environment`.
        root: the folder of code; see `environment_context`.

    Returns:
        A reference to a registered or curated environment as text, else the definition of an anonymous one. Azure ML
        builds that once, and uses the same image for the same definition again.

    Raises:
        JobError: the settings contradict one another, or name a file that does not exist or cannot be used.
    """
    from azure.ai.ml.entities import BuildContext, Environment

    _check(settings)
    if settings.name:
        return short_reference(settings.name)
    if settings.image:
        return Environment(image=settings.image, conda_file=settings.conda_file)
    if settings.build:
        return Environment(build=BuildContext(path=settings.build, dockerfile_path=settings.dockerfile))
    if settings.file in (None, OWN_IMAGE):
        context = build_folder(settings.base_image)
    else:
        context = environment_context(settings.file, settings.base_image, root)
    return Environment(build=BuildContext(path=str(context), dockerfile_path="Dockerfile"))


def describe_environment(settings: EnvironmentSettings, root: str | None = None) -> str:
    """Describe the environment of a job in one line; see `job_environment` for the arguments.

    Raises:
        JobError: `job.environment.file` names no file that can be used.
    """
    given = settings.name or settings.image or settings.build
    if given:
        return f"environment: {given}" + (f" and {settings.conda_file}" if settings.conda_file else "")
    own = f"{PACKAGE} {version(PACKAGE)}"
    base = base_of(shipped_dockerfile(settings.base_image)).rpartition("/")[2].removesuffix(":latest")
    if settings.file in (None, OWN_IMAGE):
        return f"environment: {own} and its tested versions, on {base}"
    where = "" if environment_kind(settings.file) == "dockerfile" else f", on {base}"
    pins = pins_of_file(settings.file, root)
    tested = f"; tested versions of what it does not pin: {' '.join(pins)}" if pins else ""
    return f"environment: {os.path.relpath(settings.file)} and {own}{where}{tested}"


def check_image(settings: EnvironmentSettings, size: VMSize | None) -> None:
    """Refuse the shipped image, which has PyTorch for CUDA and x86-64, on nodes that cannot run it.

    Raises:
        JobError: the nodes have AMD GPUs or NVIDIA Grace CPUs, and the settings name no other image.
    """
    if size is None or settings.name or settings.image or settings.build or _is_dockerfile(settings.file):
        return
    arm = (size.gpu_model or "").startswith("GB")  # Grace Blackwell: nd-gb200-v6-series.md, nd-gb300-v6-series.md
    if arm or size.accelerator == "amd":
        needed = "Arm CPUs, and needs an image for linux/arm64" if arm else "AMD GPUs, and needs PyTorch for ROCm"
        raise JobError(
            f"{size.name} has {needed}; our own image is for x86-64 and CUDA. Name one that holds azureml-strategy: "
            "job.environment.image=..., job.environment.build=... or job.environment.name=..."
        )


def _is_dockerfile(file: str | None) -> bool:
    return file not in (None, OWN_IMAGE) and environment_kind(file) == "dockerfile"


def _check(settings: EnvironmentSettings) -> None:
    given = [name for name in ("name", "image", "build", "file") if getattr(settings, name)]
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
    replaced = given if settings.file is None or _is_dockerfile(settings.file) else []
    if settings.base_image and replaced:
        raise JobError(
            f"job.environment.base_image is the base of our own Dockerfile, which job.environment.{given[0]} replaces. "
            "Keep one."
        )
    if settings.conda_file and not Path(settings.conda_file).is_file():
        raise JobError(f"job.environment.conda_file is {settings.conda_file}, but there is no such file.")
    if settings.build and not Path(settings.build, settings.dockerfile).is_file():
        raise JobError(
            f"job.environment.build is {settings.build}, but there is no {settings.dockerfile} in it. Another name is "
            "given by job.environment.dockerfile."
        )


def render_environment(settings: EnvironmentSettings, name: str, version: str | None = None) -> Environment:
    """Describe an environment to register as azure-ai-ml's entity, without a request to Azure.

    Empty settings use this package's Dockerfile. A version of None takes the next number.

    Raises:
        JobError: the settings contradict one another, name a missing file, or name a registered environment.
    """
    quiet_sdk()
    from azure.ai.ml.entities import Environment

    made = job_environment(settings)
    if isinstance(made, str):
        raise JobError(f"{made} is registered already, so that there is nothing to build.")
    return Environment(name=name, version=version, image=made.image, conda_file=made.conda_file, build=made.build)


@service_errors()
def build_environment(client: MLClient, environment: Environment) -> Environment:
    """Upload the build context and register the environment.

    Azure ML builds the image in the workspace's registry when the environment is registered or first used.

    Raises:
        ServiceError: the user has no permission, or the version exists with other content.
    """
    made: Environment = client.environments.create_or_update(environment)
    return made


@service_errors()
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

    job = command(
        name=f"environment-{uuid.uuid4().hex[:12]}",
        display_name=f"{environment.name}:{environment.version}",
        experiment_name="environment-check",
        command="azureml-strategy --version",
        environment=f"azureml:{environment.name}:{environment.version}",
        compute=cluster,
    )
    return str(client.jobs.create_or_update(job).name)
