"""Renders a recipe as an Azure ML command job."""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml

from azureml_strategy.cluster.job import Price
from azureml_strategy.jobs.azure_internals import standalone_job
from azureml_strategy.jobs.client import quiet_sdk
from azureml_strategy.jobs.environments import check_image, job_environment
from azureml_strategy.jobs.inputs import access_patterns, data_runtime_variables, job_inputs, job_outputs
from azureml_strategy.jobs.prices import price_for
from azureml_strategy.jobs.recipe import JobRecipe, read_recipe
from azureml_strategy.jobs.resources import (
    distribution_of,
    identity_of,
    node_size,
    price_tier,
    resources_of,
)
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.network.vm_sizes import VMSize

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command

_SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
# A reader looks for these first. The other keys follow in alphabetical order.
_FIRST = ("type", "name", "display_name", "experiment_name", "description", "tags", "command", "code", "environment")
# azure-ai-ml writes these for an anonymous definition, and derives them again from its content.
_OF_THE_SERVICE = ("name", "version", "tags")
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,254}")
_ONE_LINE = 10**6  # YAML line width: a wrapped command cannot be copied


def code_folder(recipe: JobRecipe) -> str | None:
    """The folder of code that the job gets; None if it needs none.

    Raises:
        JobError: `job.code` is not a folder.
    """
    folder = recipe.job.code
    if folder is None:
        return "." if recipe.recipe.folder is not None or recipe.own_modules else None
    if not os.path.isdir(folder):
        raise JobError(f"job.code is {folder}, but there is no such folder.")
    return folder


def recipe_in_code(recipe: JobRecipe) -> str:
    """How the job finds the recipe: a shipped one by its name, the user's own by its path in the folder of code.

    Raises:
        JobError: the recipe lies outside the folder of code, so that the job would not find it.
    """
    found = recipe.recipe
    if found.folder is None:
        return found.name
    folder = code_folder(recipe) or "."
    path = os.path.relpath(os.path.join(found.folder, f"{found.name}.yaml"), folder)
    if path.split(os.sep)[0] == os.pardir:
        raise JobError(
            f"The recipe {found.name}.yaml lies in {found.folder}, outside of {os.path.abspath(folder)}, which is all "
            "that the job gets. Call this from a folder above it, or name one: job.code=FOLDER."
        )
    return path if os.sep in path else os.path.join(os.curdir, path)


def command_line(recipe: JobRecipe) -> str:
    """The command of each process: `train` with the recipe, the user's overrides and the paths of the job.

    The user's words are quoted for the shell. The paths are not, because Azure ML replaces their placeholders.
    """
    words = ["azureml-strategy", "train", recipe_in_code(recipe), *recipe.overrides]
    return " ".join([*map(shlex.quote, words), *recipe.paths])


def render_job(recipe: str, overrides: Sequence[str], name: str | None = None) -> Command:
    """Render a recipe as a job, without credentials and without the network.

    Args:
        recipe: the name of a shipped recipe, or the path of a YAML file.
        overrides: overrides of one run, in Hydra's notation.
        name: name of the job. With None, the service chooses one.

    Returns:
        The job that `MLClient.jobs.create_or_update` takes. It contains the price of a node if that is known already.

    Raises:
        JobError: the recipe, an override, the cluster or the job is invalid.
    """
    found = read_recipe(recipe, overrides)
    return build_job(found, name, node_price(found, found.cluster.region, offline=True))


def build_job(recipe: JobRecipe, name: str | None, price: Price | None) -> Command:
    """Render a recipe that has been read; see `render_job`.

    Raises:
        JobError: the cluster, the name or the job is invalid.
    """
    quiet_sdk()
    from azure.ai.ml import command

    cluster, job, size = recipe.cluster, recipe.job, node_size(recipe.cluster)
    check_image(job.environment, size)
    if name is not None and not _JOB_NAME.fullmatch(name):
        raise JobError(
            f"{name!r} is no name of a job. Use letters, digits, - and _, the first a letter or digit, at most 255."
        )
    return command(
        name=name,
        display_name=job.display_name or _display_name(recipe, size),
        experiment_name=job.experiment or recipe.recipe.name,
        description=job.description,
        tags={**_tags(recipe, size), **job.tags},
        command=command_line(recipe),
        code=code_folder(recipe),
        environment=job_environment(job.environment),
        environment_variables=_variables(recipe, size, price),
        distribution=distribution_of(cluster, job, size),
        inputs=job_inputs(job.inputs),
        outputs=job_outputs(job.outputs),
        identity=identity_of(job.identity),
        **resources_of(cluster, job, size),
    )


def job_yaml(job: Command) -> str:
    """Write the job as the YAML that `azure.ai.ml.load_job` and `az ml job create --file` take."""
    text = io.StringIO()
    standalone_job(job).dump(text)
    written = yaml.safe_load(text.getvalue())
    for key in _OF_THE_SERVICE:
        if isinstance(written["environment"], dict):
            written["environment"].pop(key, None)
    written = _without_empty(written)
    ordered = {key: written[key] for key in sorted(written, key=_place)}
    return yaml.safe_dump({"$schema": _SCHEMA, **ordered}, sort_keys=False, width=_ONE_LINE, allow_unicode=True)


def node_price(recipe: JobRecipe, region: str | None, *, offline: bool) -> Price | None:
    """The price of one node of a recipe's cluster, or None if it is unknown.

    Args:
        recipe: the recipe that names the cluster.
        region: region of the cluster.
        offline: make no request, and use the cached prices only.

    Raises:
        JobError: the price that the user gives is invalid.
    """
    cluster, size = recipe.cluster, node_size(recipe.cluster)
    if size is None and cluster.price_per_hour is None:
        return None
    name = size.name if size else ""
    try:
        return price_for(
            name, region, price_tier(cluster), cluster.price_per_hour, currency=cluster.currency, offline=offline
        )
    except ValueError as error:
        raise JobError(str(error)) from error


def _variables(recipe: JobRecipe, size: VMSize | None, price: Price | None) -> dict[str, str]:
    """The environment variables of the job's processes. The user's own take precedence."""
    data = data_runtime_variables(access_patterns(recipe.job.inputs), size)
    return {**data, **(price.as_variables() if price else {}), **recipe.job.environment_variables}


def _display_name(recipe: JobRecipe, size: VMSize | None) -> str:
    where = size.short_name if size else recipe.cluster.compute
    return f"{recipe.recipe.name}, {recipe.cluster.num_nodes} x {where}"


def _tags(recipe: JobRecipe, size: VMSize | None) -> dict[str, str]:
    cluster = recipe.cluster
    known = {"vm_size": size.name} if size else {}
    return {"recipe": recipe.recipe.name, "nodes": str(cluster.num_nodes), "tier": cluster.tier, **known}


def _without_empty(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    return {key: _without_empty(value) for key, value in node.items() if value not in ({}, None)}


def _place(key: str) -> tuple[int, str]:
    return (_FIRST.index(key) if key in _FIRST else len(_FIRST), key)
