"""The `cluster` and `job` sections of a recipe, typed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from azureml_strategy.jobs.places import WorkspaceSettings
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.training.recipes import near_matches

Section = TypeVar("Section")


@dataclass
class ClusterSettings:
    """Where a job runs; the meaning of each key is in conf/cluster/default.yaml."""

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
    """What software a job runs in."""

    name: str | None = None
    image: str | None = None
    conda_file: str | None = None
    build: str | None = None
    dockerfile: str = "Dockerfile"
    base_image: str | None = None


@dataclass
class InputSettings:
    """Data that a job reads.

    Attributes:
        path: a data asset (`azureml:imagenet@latest`), a path in a datastore (`azureml://datastores/...`), or a
            folder here, which is uploaded first.
        type: `uri_folder`, `uri_file` or `mltable`.
        mode: `ro_mount` reads files from storage as they are needed, `download` copies all before the job starts.
        access: how files are read when they are mounted: `epochs` (each of them again and again), `once`,
            `once_large` (once, files of many megabytes from start to end) or `random` (places inside large files).
        sets: the key of the recipe that gets the path; None: the job reads AZURE_ML_INPUT_<name>, say through
            `data.input_name`.
    """

    path: str | None = None
    type: str = "uri_folder"
    mode: str = "ro_mount"
    access: str = "epochs"
    sets: str | None = None


@dataclass
class OutputSettings:
    """What a job leaves behind.

    Attributes:
        path: where in storage; None: a folder of the job's own in the workspace's default datastore.
        type: `uri_folder` or `uri_file`.
        mode: `rw_mount` writes through while the job runs, `upload` only when it ends.
        sets: the key of the recipe that gets the path.
    """

    path: str | None = None
    type: str = "uri_folder"
    mode: str = "rw_mount"
    sets: str | None = None


@dataclass
class IdentitySettings:
    """Whose rights a job has."""

    type: str | None = None
    client_id: str | None = None


@dataclass
class WorkspaceChoice:
    """Which workspace a job goes to: `WorkspaceSettings`, as OmegaConf can fill it."""

    subscription: str | None = None
    resource_group: str | None = None
    name: str | None = None

    def settings(self) -> WorkspaceSettings:
        """For `connect`."""
        return WorkspaceSettings(self.subscription, self.resource_group, self.name)


@dataclass
class JobSettings:
    """What Azure ML is told of a job; the meaning of each key is in conf/job/default.yaml."""

    experiment: str | None = None
    display_name: str | None = None
    description: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    distribution: str = "pytorch"
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    inputs: dict[str, InputSettings] = field(default_factory=dict)
    outputs: dict[str, OutputSettings] = field(default_factory=dict)
    code: str | None = None
    shm_size: str | None = None
    docker_args: str | None = None
    environment_variables: dict[str, str] = field(default_factory=dict)
    timeout: int | None = None
    identity: IdentitySettings = field(default_factory=IdentitySettings)
    workspace: WorkspaceChoice = field(default_factory=WorkspaceChoice)


def read_section(config: DictConfig, name: str, kind: type[Section]) -> Section:
    """A section of a composed recipe as its dataclass.

    Args:
        config: the recipe.
        name: the section's key.
        kind: `ClusterSettings` or `JobSettings`.

    Raises:
        JobError: a key that there is none of, or a value of the wrong kind.
    """
    section = config.get(name)
    if not isinstance(section, DictConfig):
        raise JobError(f"The recipe's section `{name}` is {section!r}. Start from a shipped recipe, or from `base`.")
    try:
        resolved = _as_text(OmegaConf.to_container(section, resolve=True))  # while it still lies in the recipe
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
    """What was resolved stays what it is: `${{name}}` is Azure ML's, and would be looked up in the recipe else."""
    if isinstance(node, dict):
        return {name: _as_text(child) for name, child in node.items()}
    return node.replace("${", r"\${") if isinstance(node, str) else node


def _keys(node: DictConfig, path: str) -> list[str]:
    children = [(f"{path}.{name}", node._get_node(name)) for name in map(str, node)]
    deeper = [key for place, child in children if isinstance(child, DictConfig) for key in _keys(child, place)]
    return [*(place for place, _ in children), *deeper]
