"""Renders endpoints of Azure ML and deployments of a registered model behind them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
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
from azureml_strategy.jobs.snapshot import describe_files, list_snapshot
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
_REQUEST_TIMEOUT_MS = 90_000  # Azure's 5 s cut off many samples on a CPU; it allows 180 s
_MINI_BATCH_TIMEOUT_S = 1800  # Azure's 30 s are too short for 10 files of 256 samples on a CPU
_RETRIES = 3  # of a mini-batch
_INSTANCE_TYPE, _INSTANCES, _MINI_BATCH_SIZE = "Standard_DS3_v2", 1, 10  # of a new deployment
SIZES = ("instance_type", "instance_count", "mini_batch_size")
"""Attributes of a request and of a deployment. Where the request has None, a deployment keeps its own value."""
# Left out of the code of an endpoint, besides what is left out of the code of a job.
_RESULTS = ("checkpoints", "outputs", "*.ckpt", "*.log", "logs", "wandb", "hang.attempt_*", "*.unsent.jsonl")
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
        instance_type: VM size of each machine of an online endpoint, with or without `Standard_`.
        instance_count: machines, or nodes of the cluster in a batch.
        mini_batch_size: files that one call of the scoring script gets in a batch.
        max_samples: most samples in one request or file.
        tags: tags of endpoint and deployment.

    A deployment that is there keeps its own size where the request has None; `create_online` and `create_batch` copy
    it. A new deployment gets Standard_DS3_v2, 1, 10 and 256.
    """

    model: str
    endpoint: str
    version: str | None = None
    deployment: str = "default"
    code: Path | None = None
    requirements: Path | None = None
    environment: str | None = None
    instance_type: str | None = None
    instance_count: int | None = None
    mini_batch_size: int | None = None
    max_samples: int | None = None
    tags: dict[str, str] | None = None

    def __post_init__(self) -> None:
        _check_name("--endpoint", self.endpoint)
        _check_name("--deployment", self.deployment)
        _check_number("--instance-count", self.instance_count, _MOST_INSTANCES)
        _check_number("--mini-batch-size", self.mini_batch_size)
        _check_number("--max-samples", self.max_samples)
        if self.instance_type is not None and not _SIZE.fullmatch(self.instance_type):
            raise JobError(
                f"--instance-type {self.instance_type} is no name of a VM size. Type one such as {_INSTANCE_TYPE}."
            )
        if self.instance_type is not None:
            refuse_retired(self.instance_type)
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


def render_online(request: DeployRequest) -> tuple[ManagedOnlineEndpoint, ManagedOnlineDeployment]:
    """Describe an online endpoint and a deployment as azure-ai-ml's entities, without a request to Azure.

    Raises:
        JobError: the folder of code cannot be used.
    """
    quiet_sdk()
    from azure.ai.ml.entities import ManagedOnlineDeployment, ManagedOnlineEndpoint, OnlineRequestSettings

    size = request.instance_type or _INSTANCE_TYPE
    size = size if size.lower().startswith("standard_") else f"Standard_{size}"
    endpoint = ManagedOnlineEndpoint(name=request.endpoint, auth_mode="key", tags=request.tags)
    deployment = ManagedOnlineDeployment(
        name=request.deployment,
        endpoint_name=request.endpoint,
        model=request.reference,
        code_configuration=_code(request, "online"),
        environment=online_environment(request, size),
        environment_variables=_variables(request),
        request_settings=OnlineRequestSettings(request_timeout_ms=_REQUEST_TIMEOUT_MS),
        instance_type=size,
        instance_count=request.instance_count or _INSTANCES,
        tags=request.tags,
    )
    return endpoint, deployment


def render_batch(request: DeployRequest, compute: str) -> tuple[BatchEndpoint, ModelBatchDeployment]:
    """Describe a batch endpoint and a deployment on a cluster as azure-ai-ml's entities, without a request to Azure.

    Raises:
        JobError: the folder of code cannot be used.
    """
    quiet_sdk()
    from azure.ai.ml.constants import BatchDeploymentOutputAction
    from azure.ai.ml.entities import (
        BatchEndpoint,
        BatchRetrySettings,
        ModelBatchDeployment,
        ModelBatchDeploymentSettings,
    )

    settings = ModelBatchDeploymentSettings(
        instance_count=request.instance_count or _INSTANCES,
        mini_batch_size=request.mini_batch_size or _MINI_BATCH_SIZE,
        max_concurrency_per_instance=1,
        # By default Azure ignores all failures, and a job completes with predictions missing. A file that cannot be
        # taken is no failure: the scoring script writes a line about it.
        error_threshold=0,
        retry_settings=BatchRetrySettings(max_retries=_RETRIES, timeout=_MINI_BATCH_TIMEOUT_S),
        output_action=BatchDeploymentOutputAction.APPEND_ROW,
        output_file_name="predictions.jsonl",
        environment_variables=_variables(request),
    )
    deployment = ModelBatchDeployment(
        name=request.deployment,
        endpoint_name=request.endpoint,
        model=request.reference,
        code_configuration=_code(request, "batch"),
        environment=_environment(request, "batch", cuda=True),
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
    """The folder of code, the image, and what stays of a deployment that is there already, a line each."""
    code = Path(deployment.code_configuration.code)
    sent = [each for each in code.rglob("*") if each.is_file()]
    size = describe_files(len(sent), sum(each.stat().st_size for each in sent))
    left = _results(list_snapshot(str(request.code)).files) if request.code is not None else []
    without = f"; left out as results of a training: {', '.join(left[:3])}{', ...' if len(left) > 3 else ''}"
    lines = [
        f"code: {code}, with {SCRIPT}: {size}{without if left else ''}",
        _describe_environment(request, deployment),
    ]
    if None in (request.instance_type, request.instance_count):
        lines.append("size: of a new deployment; an existing deployment keeps its size where no option gives another")
    return lines


def _describe_environment(request: DeployRequest, deployment: Any) -> str:
    if request.environment:
        return f"environment: {request.environment}"
    folder = Path(deployment.environment.build.path)
    base = base_of((folder / "Dockerfile").read_text(encoding="utf-8")).rpartition("/")[2].removesuffix(":latest")
    servers = [line for line in (folder / "serving.txt").read_text("utf-8").splitlines() if line.startswith(_SERVERS)]
    held = ", ".join([f"{PACKAGE} {version(PACKAGE)} and its tested versions", *servers])
    return f"environment: {held}, on {base}; Azure ML builds it from {folder}"


def _code(request: DeployRequest, kind: str) -> CodeConfiguration:
    from azure.ai.ml.entities import CodeConfiguration

    own = request.code
    listed = list_snapshot(str(own)).files if own is not None else ()
    names = sorted(set(listed) - set(_results(listed)))
    if SCRIPT in names:
        raise JobError(f"{own} has a {SCRIPT}, which is the name of the scoring script. Rename yours.")

    def fill(folder: Path) -> None:
        for name in names:
            assert own is not None
            copy_file(own / name, folder / name)
        script = files("azureml_strategy.serving").joinpath(f"{kind}.py")
        (folder / SCRIPT).write_bytes(script.read_bytes())

    return CodeConfiguration(code=str(keep_context(fill)), scoring_script=SCRIPT)


def _results(names: Iterable[str]) -> list[str]:
    """The checkpoints and logs among the files, which no endpoint reads. A module counts as code in any folder."""
    others = [name for name in names if not name.endswith(".py")]
    return [name for name in others if any(fnmatch(part, result) for part in name.split("/") for result in _RESULTS)]


def online_environment(request: DeployRequest, instance_type: str) -> Environment | str:
    """The environment of an online deployment, whose image has CUDA only if the machines have GPUs."""
    cuda = instance_type.lower().removeprefix("standard_").startswith("n")  # NC, ND, NG, NV: Azure's sizes with GPUs
    return _environment(request, "online", cuda=cuda)


def _environment(request: DeployRequest, kind: str, *, cuda: bool) -> Environment | str:
    from azure.ai.ml.entities import BuildContext, Environment

    if request.environment:
        return short_reference(request.environment)
    build = BuildContext(path=str(serving_folder(kind, request.requirements, cuda=cuda)), dockerfile_path="Dockerfile")
    if kind == "batch":
        return Environment(build=build)
    probe, score = {"path": "/", "port": _PORT}, {"path": "/score", "port": _PORT}
    routes = {"liveness_route": probe, "readiness_route": probe, "scoring_route": score}
    return Environment(build=build, inference_config=routes)


def _variables(request: DeployRequest) -> dict[str, str]:
    return {} if request.max_samples is None else {MAX_SAMPLES: str(request.max_samples)}


def _check_name(option: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise JobError(
            f"{option} is {name!r}. A name has 3 to 32 letters, digits and -, begins with a letter, and does not end "
            "with -."
        )


def _check_number(option: str, number: int | None, most: int | None = None) -> None:
    if number is not None and (number < 1 or (most is not None and number > most)):
        raise JobError(f"{option} is {number}. Give a number from 1 {'on' if most is None else f'to {most}'}.")
