"""Reads the `cluster` and `job` sections of a recipe into dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from azureml_strategy.jobs.client import WorkspaceSettings
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.training.recipes import near_matches

Section = TypeVar("Section")


@dataclass
class ClusterSettings:
    """Where a job runs. conf/cluster/default.yaml explains each key."""

    vm_size: str | None = None
    num_nodes: int = 1
    tier: str = "dedicated"
    compute: str | None = None
    processes_per_node: int | None = None
    allow_ethernet: bool = False
    price_per_hour: float | None = None
    currency: str = "USD"
    region: str | None = None


@dataclass
class EnvironmentSettings:
    """The software environment of a job. conf/job/plain.yaml explains each key."""

    name: str | None = None
    image: str | None = None
    conda_file: str | None = None
    build: str | None = None
    dockerfile: str = "Dockerfile"
    base_image: str | None = None
    file: str | None = None


@dataclass
class InputSettings:
    """Data that a job reads, or a value.

    Attributes:
        path: a data asset (`azureml:imagenet@latest`), a path in a datastore (`azureml://datastores/...`), or a local
            folder, which is uploaded first.
        type: `uri_folder`, `uri_file`, `mltable`, or a model: `custom_model`, `mlflow_model`, `triton_model`.
        mode: `ro_mount` reads files from storage as they are needed, `download` copies all before the job starts,
            `direct` passes the address on; None is Azure ML's own choice.
        access: access pattern of mounted files: `epochs` (each file again and again), `once`, `once_large` (once, files
            of many megabytes from start to end) or `random` (places inside large files).
        sets: the key of the recipe that gets the path. With None, the job reads AZURE_ML_INPUT_<name>, for example
            through `data.input_name`.
        value: a number, a text or a truth value in place of data; then `path` is None, and nothing else counts.
    """

    path: str | None = None
    type: str = "uri_folder"
    mode: str | None = "ro_mount"
    access: str = "epochs"
    sets: str | None = None
    value: Any = None


@dataclass
class OutputSettings:
    """Results that a job writes to storage.

    Attributes:
        path: place in storage. None is a folder of the job's own in the workspace's default datastore.
        type: `uri_folder`, `uri_file` or a model, as for inputs.
        mode: `rw_mount` writes to storage while the job runs, `upload` only when it ends; None is Azure ML's choice.
        sets: the key of the recipe that gets the path.
    """

    path: str | None = None
    type: str = "uri_folder"
    mode: str | None = "rw_mount"
    sets: str | None = None


@dataclass
class ServiceSettings:
    """A way into the running job, shown on its page in Studio.

    Attributes:
        type: `ssh`, `vs_code`, `jupyter_lab` or `tensor_board`; None is the service's own name.
        nodes: `all` for every node; None for the first.
        ssh_public_keys: for `ssh`, the public key, or the path of its file.
        log_dir: for `tensor_board`, the folder of its events.
    """

    type: str | None = None
    nodes: str | None = None
    ssh_public_keys: str | None = None
    log_dir: str | None = None


@dataclass
class QueueSettings:
    """The place of a job in its queue. conf/job/plain.yaml explains each key."""

    priority: str | None = None


@dataclass
class IdentitySettings:
    """The identity whose rights a job has. conf/job/plain.yaml explains each key."""

    type: str | None = None
    client_id: str | None = None


@dataclass
class JobSettings:
    """The settings of a job in Azure ML. conf/job/plain.yaml explains each key."""

    experiment: str | None = None
    display_name: str | None = None
    description: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    distribution: str = "pytorch"
    parameter_server_count: int = 0
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    inputs: dict[str, InputSettings] = field(default_factory=dict)
    outputs: dict[str, OutputSettings] = field(default_factory=dict)
    checkpoint: str | None = None
    code: str | None = None
    instance_type: str | None = None
    max_instance_count: int | None = None
    locations: list[str] | None = None
    queue: QueueSettings = field(default_factory=QueueSettings)
    services: dict[str, ServiceSettings] = field(default_factory=dict)
    shm_size: str | None = None
    docker_args: str | None = None
    environment_variables: dict[str, str] = field(default_factory=dict)
    timeout: int | None = None
    identity: IdentitySettings = field(default_factory=IdentitySettings)
    workspace: WorkspaceSettings = field(default_factory=WorkspaceSettings)
    plain: bool = False


def read_section(config: DictConfig, name: str, kind: type[Section]) -> Section:
    """Read a section of a composed recipe into its dataclass.

    Raises:
        JobError: the section is missing, has an unknown key, or a value has the wrong type.
    """
    section = config.get(name)
    if not isinstance(section, DictConfig):
        raise JobError(f"The recipe's section `{name}` is {section!r}. Start from a shipped recipe, or from `base`.")
    try:
        # Resolve before the merge: interpolations refer to the whole recipe.
        resolved = _as_text(OmegaConf.to_container(section, resolve=True))
        merged = OmegaConf.merge(OmegaConf.structured(kind), resolved)
        settings: Any = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        key = f"{name}.{error.full_key}"
        near = near_matches(key, _keys(OmegaConf.structured(kind), name))
        raise JobError(f"The recipe sets {key}, which nothing reads. {near}") from error
    except OmegaConfBaseException as error:
        place = f"{name}.{error.full_key}".rstrip(".")
        raise JobError(f"{place} cannot be used: {str(error).splitlines()[0]}.") from error
    return settings  # type: ignore[no-any-return]


def _as_text(node: Any) -> Any:
    """Escape `${` in resolved values: OmegaConf would look Azure ML's `${{name}}` up in the recipe."""
    if isinstance(node, dict):
        return {name: _as_text(child) for name, child in node.items()}
    return node.replace("${", r"\${") if isinstance(node, str) else node


def _keys(node: DictConfig, path: str) -> list[str]:
    children = [(f"{path}.{name}", node._get_node(name)) for name in map(str, node)]
    deeper = [key for place, child in children if isinstance(child, DictConfig) for key in _keys(child, place)]
    return [*(place for place, _ in children), *deeper]


def check_choice(place: str, value: str | None, known: Sequence[str]) -> None:
    """Refuse a value that is not one of the known ones; None is for the default.

    Raises:
        JobError: the value is unknown. The message names the place and the known values.
    """
    if value is not None and value not in known:
        raise JobError(f"{place} is {value!r}. Known: {', '.join(known)}.")
