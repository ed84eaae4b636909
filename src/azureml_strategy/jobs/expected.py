"""What the planner expects of a job before it is sent: the rate that its run is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.cluster.environ import EXPECTED_RATE_VARIABLE
from azureml_strategy.network.vm_sizes import VMSize, lookup_vm_size

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command

    from azureml_strategy.jobs.plan import JobPlan
    from azureml_strategy.jobs.recipe import JobRecipe
    from azureml_strategy.tracking.expected import ExpectedRate


def expect_job(recipe: JobRecipe) -> ExpectedRate | None:
    """Predict the rate of a recipe's job, without its data and without a request.

    Returns:
        None for what cannot be planned: a size that nobody knows, some of a node's GPUs, a network of the user's own,
        whose code is not run here, one that needs its weights, and a sweep, whose trials differ.
    """
    size = _size(recipe)
    if size is None or recipe.job.plain or recipe.sweep is not None:
        return None
    if recipe.cluster.processes_per_node not in (None, size.gpus):
        return None
    from azureml_strategy.planning.errors import PlanError
    from azureml_strategy.planning.expected import expect_rate, has_own_network

    if not has_own_network(recipe.model_targets):
        return None
    try:
        return expect_rate(recipe.path, recipe.overrides, size, recipe.cluster.num_nodes)
    except (PlanError, TypeError, ValueError):  # a value that is wrong is told by the job, or by its own check
        return None


def add_expectation(plan: JobPlan, job: Command) -> None:
    """Give a job the rate that the planner expects of it, in a variable that the end of the run reads.

    Args:
        plan: what is planned.
        job: the rendered plan. Its own variables take precedence.
    """
    expected = plan.expect() if plan.expect else None
    if expected is not None:
        job.environment_variables = {EXPECTED_RATE_VARIABLE: expected.to_text(), **job.environment_variables}


def _size(recipe: JobRecipe) -> VMSize | None:
    try:
        return lookup_vm_size(recipe.cluster.vm_size) if recipe.cluster.vm_size else None
    except LookupError:  # the job's own check says so
        return None
