"""What the planner expects of a job before it is sent: the rate that its run is held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from azureml_strategy.cluster.environ import EXPECTED_RATE_VARIABLE
from azureml_strategy.jobs.settings import ClusterSettings
from azureml_strategy.network.vm_sizes import VMSize, lookup_vm_size

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command

    from azureml_strategy.jobs.plan import JobPlan
    from azureml_strategy.tracking.expected import ExpectedRate


def expect_job(
    recipe: str, overrides: Sequence[str], cluster: ClusterSettings, model_targets: Iterable[str]
) -> ExpectedRate | None:
    """Predict the rate of a recipe's job, without its data and without a request.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: overrides of one run.
        cluster: where it is to run.
        model_targets: each `_target_` of the recipe's section `model`.

    Returns:
        None for what cannot be planned: a size that nobody knows, some of a node's GPUs, a network of the user's own,
        whose code is not run here, or one that needs its weights.
    """
    size = _size(cluster)
    if size is None or cluster.processes_per_node not in (None, size.gpus):
        return None
    from azureml_strategy.planning.errors import PlanError
    from azureml_strategy.planning.expected import expect_rate, has_own_network

    if not has_own_network(model_targets):
        return None
    try:
        return expect_rate(recipe, overrides, size, cluster.num_nodes)
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


def _size(cluster: ClusterSettings) -> VMSize | None:
    try:
        return lookup_vm_size(cluster.vm_size) if cluster.vm_size else None
    except LookupError:  # the job's own check says so
        return None
