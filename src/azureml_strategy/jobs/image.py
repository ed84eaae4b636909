"""Environments made ahead of the jobs that use them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from azureml_strategy.jobs.environments import job_environment
from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.quiet import quiet_sdk
from azureml_strategy.jobs.service_errors import service_errors
from azureml_strategy.jobs.settings import EnvironmentSettings

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Environment

_CHECK = "azureml-strategy --version"
_EXPERIMENT = "environment-check"


def render_environment(settings: EnvironmentSettings, name: str, version: str | None = None) -> Environment:
    """The environment as azure-ai-ml's entity; nothing is asked of Azure.

    Args:
        settings: what it is made of, as `job.environment` has it; nothing: this package's own Dockerfile.
        name: to register it under.
        version: None: the next number.

    Raises:
        JobError: the settings contradict one another, or name what is not there.
    """
    quiet_sdk()
    from azure.ai.ml.entities import Environment

    made = job_environment(settings)
    if isinstance(made, str):
        raise JobError(f"{made} is registered already, so that there is nothing to build.")
    return Environment(name=name, version=version, image=made.image, conda_file=made.conda_file, build=made.build)


def build_environment(client: MLClient, environment: Environment) -> Environment:
    """Upload what the image is built from and register it.

    Azure ML builds the image in the workspace's registry when the environment is registered or first used.

    Raises:
        ServiceError: no permission, or the version exists with other content.
    """
    with service_errors():
        made: Environment = client.environments.create_or_update(environment)
    return made


def check_environment(client: MLClient, environment: Environment, cluster: str | None) -> str:
    """Submit a job of a few seconds in the environment, so that its image is there before a cluster waits for it.

    Args:
        client: of the workspace.
        environment: as `build_environment` returned it.
        cluster: which to run on; None: serverless compute.

    Returns:
        The job's name.

    Raises:
        ServiceError: the job is refused.
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
