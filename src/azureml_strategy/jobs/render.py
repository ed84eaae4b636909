"""Renders what is planned as an Azure ML command job."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from azureml_strategy.cluster.job import Price
from azureml_strategy.jobs.azure_internals import standalone_job
from azureml_strategy.jobs.client import quiet_sdk
from azureml_strategy.jobs.environments import check_image, job_environment
from azureml_strategy.jobs.expected import add_expectation
from azureml_strategy.jobs.hyperparameters import build_sweep
from azureml_strategy.jobs.inputs import access_patterns, data_runtime_variables, job_inputs, job_outputs
from azureml_strategy.jobs.plan import JobPlan
from azureml_strategy.jobs.prices import add_price
from azureml_strategy.jobs.program import Program, plan_call
from azureml_strategy.jobs.recipe import plan_recipe
from azureml_strategy.jobs.resources import resources_of, services_of
from azureml_strategy.jobs.service_errors import JobError

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command
    from azure.ai.ml.sweep import SweepJob

_SCHEMAS = {kind: f"https://azuremlschemas.azureedge.net/latest/{kind}Job.schema.json" for kind in ("command", "sweep")}
# A reader looks for these first. The other keys follow in alphabetical order.
_FIRST = ("type", "name", "display_name", "experiment_name", "description", "tags", "command", "code", "environment")
# azure-ai-ml writes these for an anonymous definition, and derives them again from its content.
_OF_THE_SERVICE = ("name", "version", "tags")
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,254}")
_ONE_LINE = 10**6  # YAML line width: a wrapped command cannot be copied


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
    job, _ = _build_with_price(plan_recipe(recipe, overrides), name)
    return job


def render_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    cluster: str | None = None,
    num_nodes: int | None = None,
    overrides: Sequence[str] = (),
    inputs: Mapping[str, str | float] | None = None,
    outputs: Mapping[str, str | None] | None = None,
    name: str | None = None,
) -> Command:
    """Render a Python script of the user's as a job, without credentials and without the network.

    Args:
        script: path of the script.
        arguments: its arguments, each passed on exactly. `${{inputs.NAME}}` stands for the path of an input.
        cluster: a size, as for `cluster=` on the command line: `nd96isr_h100_v5`.
        num_nodes: nodes of the job.
        overrides: further settings of `cluster` and `job`, in Hydra's notation.
        inputs: path or value of each input, as for `--input`.
        outputs: address of each output; None for a folder of the job's own.
        name: name of the job. With None, the service chooses one.

    Returns:
        The job that `MLClient.jobs.create_or_update` takes, and `job_yaml` writes.

    Raises:
        JobError: the script, a setting or an input is invalid.
    """
    program = Program(script=script, arguments=tuple(arguments))
    job, _ = _build_with_price(plan_call(program, cluster, num_nodes, overrides, inputs, outputs), name)
    return job


def render_offline(plan: JobPlan, name: str | None) -> tuple[Command, Price | None, str]:
    """Render a plan without a request, as it would be sent.

    Returns:
        The job, which is that of a trial in a sweep; the price of a node, if it is known; the YAML of the job or sweep.

    Raises:
        JobError: the cluster, the name, the job or the sweep is invalid.
    """
    job, price = _build_with_price(plan, name)
    add_expectation(plan, job)
    return job, price, job_yaml(build_sweep(job, plan.sweep) if plan.sweep else job)


def build_offline(plan: JobPlan, name: str | None = None) -> Command | SweepJob:
    """Render a plan, as a sweep if it is one, with the price of a node if that is known without a request.

    Raises:
        JobError: the cluster, the name, the job or the sweep is invalid.
    """
    job, _ = _build_with_price(plan, name)
    return build_sweep(job, plan.sweep) if plan.sweep else job


def _build_with_price(plan: JobPlan, name: str | None) -> tuple[Command, Price | None]:
    """Render a plan, with the price of a node if that is known without a request."""
    job = build_job(plan, name)
    return job, add_price(plan, job, plan.cluster.region, offline=True)


def build_job(plan: JobPlan, name: str | None) -> Command:
    """Render a plan, without the price of a node; `add_price` adds it.

    Raises:
        JobError: the cluster, the name or the job is invalid.
    """
    quiet_sdk()
    from azure.ai.ml import command

    cluster, job, size = plan.cluster, plan.job, plan.size
    resources = resources_of(cluster, job, size)
    check_image(job.environment, size)
    if name is not None and not _JOB_NAME.fullmatch(name):
        raise JobError(
            f"{name!r} is no name of a job. Use letters, digits, - and _, the first a letter or digit, at most 255."
        )
    environment = job_environment(job.environment, plan.code)
    display_name, experiment, tags = job.display_name, job.experiment, dict(job.tags)
    variables = {**plan.variables, **job.environment_variables}  # the user's own variables take precedence
    if not job.plain:
        where = size.short_name if size else cluster.compute
        display_name = display_name or f"{plan.title or plan.name}, {cluster.num_nodes} x {where}"
        experiment = experiment or plan.name
        known = {"vm_size": size.name} if size else {}
        tags = {**plan.tags, "nodes": str(cluster.num_nodes), "tier": cluster.tier, **known, **tags}
        variables = {**data_runtime_variables(access_patterns(job.inputs), size), **variables}
    made = command(
        name=name,
        display_name=display_name or None,
        experiment_name=experiment or None,
        description=job.description,
        tags=tags,
        command=plan.command,
        code=plan.code,
        environment=environment,
        environment_variables=variables,
        inputs=job_inputs(job.inputs),
        outputs=job_outputs(job.outputs),
        services=services_of(job.services) or None,
        **resources,
    )
    if job.max_instance_count is not None:
        made.resources.max_instance_count = job.max_instance_count  # no argument of `command` sets it
    return made


def job_yaml(job: Command | SweepJob) -> str:
    """Write the job as the YAML that `azure.ai.ml.load_job` and `az ml job create --file` take."""
    from azure.ai.ml.entities import Command

    text = io.StringIO()
    (standalone_job(job) if isinstance(job, Command) else job).dump(text)
    written = yaml.safe_load(text.getvalue())
    for part in (written, written.get("trial", {})):
        if isinstance(part.get("environment"), dict):
            for key in _OF_THE_SERVICE:
                part["environment"].pop(key, None)
    written = _without_empty(written)
    ordered = {key: written[key] for key in (*_FIRST, *sorted(written.keys() - set(_FIRST))) if key in written}
    schema = _SCHEMAS[written["type"]]
    return yaml.safe_dump({"$schema": schema, **ordered}, sort_keys=False, width=_ONE_LINE, allow_unicode=True)


def _without_empty(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    return {key: _without_empty(value) for key, value in node.items() if value not in ({}, None)}
