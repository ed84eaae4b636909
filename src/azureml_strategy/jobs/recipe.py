"""Composes the recipe and overrides of a job, and checks that they are valid and contain no secrets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from azureml_strategy.cluster.redaction import is_secret, redact_text
from azureml_strategy.command_line import is_override
from azureml_strategy.jobs.inputs import path_overrides
from azureml_strategy.jobs.resources import refuse_retired
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.settings import ClusterSettings, JobSettings, read_section
from azureml_strategy.training.checks import compose_recipe, target_nodes
from azureml_strategy.training.recipes import Recipe, RecipeError, find_recipe, near_matches
from azureml_strategy.training.resolvers import register_resolvers
from azureml_strategy.training.targets import lies_in, refuse_missing

_INSTEAD = (
    "A job's command and variables can be read by everybody with access to the workspace. Put it into the workspace's "
    "key vault and read it in the job, and reach storage through a datastore or the job's own identity "
    "(job.identity.type=managed)."
)


def refuse_secrets(texts: Mapping[str, str]) -> None:
    """Refuse texts that contain a secret, before a job carries them.

    Args:
        texts: each value by its name: a variable, a key of the recipe, or another place that the user can find.

    Raises:
        JobError: a value is secret by its name, by its form, or because a variable of this process with a secret name
            holds it. The message does not repeat the value.
    """
    for name, value in texts.items():
        if is_secret(name, value):
            raise JobError(
                f"{name} looks like a secret, by its name, its form or a variable that holds it, so that no job was "
                f"made. {_INSTEAD}"
            )


def override_texts(overrides: Iterable[str]) -> dict[str, str]:
    """The value of each override of a command line, by its key."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+~"): value for key, _, value in pairs}


@dataclass(frozen=True)
class JobRecipe:
    """A recipe, its overrides and the settings of its job.

    Attributes:
        recipe: the recipe of the run.
        overrides: the user's overrides, unchanged.
        paths: further overrides, which give the run the paths of the job's inputs and outputs.
        cluster: where the job runs.
        job: the job's settings in Azure ML.
        own_modules: whether the recipe names a module of the current folder, so that the job needs that folder.
    """

    recipe: Recipe
    overrides: tuple[str, ...]
    paths: tuple[str, ...]
    cluster: ClusterSettings
    job: JobSettings
    own_modules: bool = False


def read_recipe(recipe: str, overrides: Sequence[str]) -> JobRecipe:
    """Compose a recipe and read its `cluster` and `job` sections.

    Args:
        recipe: the name of a shipped recipe, or the path of a YAML file.
        overrides: overrides of one run, in Hydra's notation.

    Raises:
        JobError: the recipe, an override or a key is misspelt, or the overrides contain a sweep, a flag of Hydra or a
            secret.
    """
    register_resolvers()
    for argument in overrides:
        if not is_override(argument):
            raise JobError(
                f"{argument!r} is no override. A job takes KEY=VALUE alone; Hydra's own flags belong to "
                "`azureml-strategy train`, and a folder of groups into hydra.searchpath=[...]."
            )
        _refuse_sweep(argument)
        if argument.startswith("cluster="):
            refuse_retired(argument.removeprefix("cluster="))
    refuse_secrets(override_texts(overrides))
    try:
        found = find_recipe(recipe)
        config = compose_recipe(found, overrides)
        named = [(place, str(node["_target_"])) for place, node in target_nodes(config)]
        for place, target in named:
            refuse_missing(place, target)
    except RecipeError as error:
        raise JobError(str(error)) from error
    refuse_secrets(dict(_leaves(config)))
    cluster, job = read_section(config, "cluster", ClusterSettings), read_section(config, "job", JobSettings)
    refuse_secrets(_texts(job))
    paths = path_overrides(job, overrides)
    for path in paths:
        _check_key(config, path.partition("=")[0])
    own_modules = any(lies_in(os.curdir, target) for _, target in named)
    return JobRecipe(found, tuple(overrides), tuple(paths), cluster, job, own_modules)


def _refuse_sweep(text: str) -> None:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise JobError(redact_text(f"The override {text!r} is not in Hydra's notation: {error}")) from error
    if override.is_sweep_override():
        raise JobError(
            f"{text!r} stands for several runs, and a job is one. Sweep by `azureml-strategy train RECIPE -m {text} "
            f"hydra/launcher=azureml`, or put a value with commas in quotation marks: \"'...'\"."
        )


def _texts(job: JobSettings) -> dict[str, str]:
    """The settings of the job that Azure ML shows to everybody with access to the workspace."""
    texts = {f"job.environment_variables.{name}": value for name, value in job.environment_variables.items()}
    texts |= {f"job.tags.{name}": value for name, value in job.tags.items()}
    texts |= {f"job.inputs.{name}.path": each.path or "" for name, each in job.inputs.items()}
    texts |= {f"job.outputs.{name}.path": each.path or "" for name, each in job.outputs.items()}
    alone = ("experiment", "display_name", "description", "docker_args")
    return texts | {f"job.{name}": getattr(job, name) or "" for name in alone}


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of the recipe with its key, interpolations unresolved: the file is uploaded with the code."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=False)
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, list):
        for each in node:
            yield from _leaves(each, path)
    elif isinstance(node, dict):
        for name, child in node.items():
            if path or name != "hydra":  # the hydra section repeats every override
                yield from _leaves(child, f"{path}.{name}" if path else str(name))


def _check_key(config: DictConfig, key: str) -> None:
    """Refuse to set a path on a key that the recipe does not have: the job would fail at it."""
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(config, section) if section else config
    if not isinstance(node, DictConfig) or name not in node:
        known = [f"{section}.{each}".lstrip(".") for each in map(str, node)] if isinstance(node, DictConfig) else []
        raise JobError(f"{key} is to get a path of the job, but the recipe has no such key. {near_matches(key, known)}")
