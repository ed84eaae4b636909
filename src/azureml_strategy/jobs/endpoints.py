"""Renders endpoints of Azure ML and deployments of a registered model behind them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from azureml_strategy.jobs.client import as_yaml, quiet_sdk
from azureml_strategy.jobs.image import PACKAGE, base_of, copy_file, keep_context, serving_folder
from azureml_strategy.jobs.inputs import short_reference
from azureml_strategy.jobs.resources import refuse_retired
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.snapshot import list_snapshot
from azureml_strategy.serving import MAX_SAMPLES

if TYPE_CHECKING:
    from azure.ai.ml.entities import (
        BatchEndpoint,
        CodeConfiguration,
        Environment,
        ManagedOnlineDeployment,
        ManagedOnlineEndpoint,
        ModelBatchDeployment,
    )

SCRIPT = "score.py"
_SERVERS = ("azureml-inference-server-http", "azureml-core", "azureml-dataset-runtime")
_PORT = 5001  # of Azure ML's inference server
# https://learn.microsoft.com/azure/machine-learning/how-to-manage-quotas, limits of endpoints
_NAME = re.compile(r"[a-zA-Z](?:[a-zA-Z0-9-]{1,30})[a-zA-Z0-9]")
_MOST_INSTANCES = 50
_SIZE = re.compile(r"(?:Standard_)?[A-Z][A-Za-z0-9]*(?:[_-][A-Za-z0-9]+)*", re.I)


@dataclass(frozen=True, kw_only=True)
class DeployRequest:
    """A deployment of a registered model.

    Attributes:
        model: name of the model.
        endpoint: name of the endpoint, which is made unless it is there.
        version: version of the model. None is the newest.
        deployment: name of the deployment.
        code: folder with the modules that the model's class is in. None for a class of this package or of the image.
        requirements: file of further packages for the image.
        environment: reference of a registered environment in place of our image.
        instances: machines, or nodes of the cluster in a batch.
        max_samples: most samples in one request or file.
        tags: tags of endpoint and deployment.
    """

    model: str
    endpoint: str
    version: str | None = None
    deployment: str = "default"
    code: Path | None = None
    requirements: Path | None = None
    environment: str | None = None
    instances: int = 1
    max_samples: int | None = None
    tags: dict[str, str] | None = None

    def __post_init__(self) -> None:
        _check_name("--endpoint", self.endpoint)
        _check_name("--deployment", self.deployment)
        _check_number("--instance-count", self.instances, _MOST_INSTANCES)
        if self.max_samples is not None:
            _check_number("--max-samples", self.max_samples)
        if self.requirements is not None and self.environment is not None:
            raise JobError("--requirements is for our own image, which --environment replaces. Keep one of them.")
        for option, path in (("--code", self.code), ("--requirements", self.requirements)):
            if path is not None and not (path.is_dir() if option == "--code" else path.is_file()):
                raise JobError(
                    f"{option} is {path}, but there is no such {'folder' if option == '--code' else 'file'}."
                )

    @property
    def reference(self) -> str:
        """The model as azure-ai-ml's classes take it: see `short_reference`."""
        return self.model + (f":{self.version}" if self.version else "@latest")


def render_online(request: DeployRequest, instance_type: str) -> tuple[ManagedOnlineEndpoint, ManagedOnlineDeployment]:
    """Describe an online endpoint and a deployment as azure-ai-ml's entities, without a request to Azure.

    Args:
        request: what is deployed.
        instance_type: VM size of each machine, with or without `Standard_`.

    Raises:
        JobError: the size is no name of a size or retired, or the folder of code cannot be used.
    """
    size = _instance_type(instance_type)
    quiet_sdk()
    from azure.ai.ml.entities import ManagedOnlineDeployment, ManagedOnlineEndpoint

    endpoint = ManagedOnlineEndpoint(name=request.endpoint, auth_mode="key", tags=request.tags)
    deployment = ManagedOnlineDeployment(
        name=request.deployment,
        endpoint_name=request.endpoint,
        model=request.reference,
        code_configuration=_code(request, "online"),
        environment=_environment(request, "online"),
        environment_variables=_variables(request),
        instance_type=size,
        instance_count=request.instances,
        tags=request.tags,
    )
    return endpoint, deployment


def render_batch(
    request: DeployRequest, compute: str, files_at_a_time: int = 10
) -> tuple[BatchEndpoint, ModelBatchDeployment]:
    """Describe a batch endpoint and a deployment as azure-ai-ml's entities, without a request to Azure.

    Args:
        request: what is deployed.
        compute: name of the cluster that predicts.
        files_at_a_time: files that one call of the scoring script gets.

    Raises:
        JobError: the number of files is none, or the folder of code cannot be used.
    """
    _check_number("--mini-batch-size", files_at_a_time)
    quiet_sdk()
    from azure.ai.ml.constants import BatchDeploymentOutputAction
    from azure.ai.ml.entities import BatchEndpoint, ModelBatchDeployment, ModelBatchDeploymentSettings

    settings = ModelBatchDeploymentSettings(
        instance_count=request.instances,
        mini_batch_size=files_at_a_time,
        max_concurrency_per_instance=1,
        output_action=BatchDeploymentOutputAction.APPEND_ROW,
        output_file_name="predictions.jsonl",
        environment_variables=_variables(request),
    )
    deployment = ModelBatchDeployment(
        name=request.deployment,
        endpoint_name=request.endpoint,
        model=request.reference,
        code_configuration=_code(request, "batch"),
        environment=_environment(request, "batch"),
        compute=compute,
        settings=settings,
        tags=request.tags,
    )
    return BatchEndpoint(name=request.endpoint, tags=request.tags), deployment


def document(entity: Any) -> str:
    """Write an endpoint or a deployment as the YAML that its `load_...` function and `az ml` take."""
    # An endpoint's `dump` returns its content and writes nothing; a deployment's does both.
    written = yaml.safe_load(as_yaml(entity)) or json.loads(json.dumps(entity.dump()))
    if isinstance(written.get("environment"), dict):
        for key in ("name", "version", "tags"):  # of an anonymous definition; derived again from its content
            written["environment"].pop(key, None)
    if "settings" in written:  # `load_batch_deployment` takes them at the top, and `az ml` too
        written |= {"type": None, "resources": None, **written.pop("settings")}
        written["resources"] = {"instance_count": written.pop("instance_count")}
    return yaml.safe_dump({key: each for key, each in written.items() if each not in ({}, None)}, width=10**6)


def describe(request: DeployRequest, deployment: Any) -> list[str]:
    """The folder of code and the image of a deployment, a line each."""
    code = f"code: {deployment.code_configuration.code}, with {SCRIPT}"
    if request.environment:
        return [code, f"environment: {request.environment}"]
    folder = Path(deployment.environment.build.path)
    base = base_of((folder / "Dockerfile").read_text(encoding="utf-8")).rpartition("/")[2].removesuffix(":latest")
    servers = [line for line in (folder / "serving.txt").read_text("utf-8").splitlines() if line.startswith(_SERVERS)]
    held = ", ".join([f"{PACKAGE} {version(PACKAGE)} and its tested versions", *servers])
    return [code, f"environment: {held}, on {base}; Azure ML builds it from {folder}"]


def _code(request: DeployRequest, kind: str) -> CodeConfiguration:
    from azure.ai.ml.entities import CodeConfiguration

    own = request.code
    names = list_snapshot(str(own)).files if own is not None else ()
    if SCRIPT in names:
        raise JobError(f"{own} has a {SCRIPT}, which is the name of the scoring script. Rename yours.")

    def fill(folder: Path) -> None:
        for name in names:
            assert own is not None
            copy_file(own / name, folder / name)
        script = files("azureml_strategy.serving").joinpath(f"{kind}.py")
        (folder / SCRIPT).write_bytes(script.read_bytes())

    return CodeConfiguration(code=str(keep_context(fill)), scoring_script=SCRIPT)


def _environment(request: DeployRequest, kind: str) -> Environment | str:
    from azure.ai.ml.entities import BuildContext, Environment

    if request.environment:
        return short_reference(request.environment)
    build = BuildContext(path=str(serving_folder(kind, request.requirements)), dockerfile_path="Dockerfile")
    if kind == "batch":
        return Environment(build=build)
    probe, score = {"path": "/", "port": _PORT}, {"path": "/score", "port": _PORT}
    routes = {"liveness_route": probe, "readiness_route": probe, "scoring_route": score}
    return Environment(build=build, inference_config=routes)


def _variables(request: DeployRequest) -> dict[str, str]:
    return {} if request.max_samples is None else {MAX_SAMPLES: str(request.max_samples)}


def _instance_type(given: str) -> str:
    if not _SIZE.fullmatch(given):
        raise JobError(f"--instance-type {given} is no name of a VM size. Type one such as Standard_DS3_v2.")
    refuse_retired(given)
    return given if given.lower().startswith("standard_") else f"Standard_{given}"


def _check_name(option: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise JobError(
            f"{option} is {name!r}. A name has 3 to 32 letters, digits and -, begins with a letter, and does not end "
            "with -."
        )


def _check_number(option: str, number: int, most: int | None = None) -> None:
    if number < 1 or (most is not None and number > most):
        raise JobError(f"{option} is {number}. Give a number from 1 {'on' if most is None else f'to {most}'}.")
