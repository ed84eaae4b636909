"""What the planner expects of a job before it is sent: the rate that its run is held against."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from azureml_strategy.cluster.environ import EXPECTED_RATE_VARIABLE
from azureml_strategy.jobs.settings import ClusterSettings
from azureml_strategy.network.vm_sizes import VMSize, lookup_vm_size

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command

    from azureml_strategy.jobs.plan import JobPlan
    from azureml_strategy.tracking.expected import ExpectedRate


def expect_job(recipe: str, overrides: Sequence[str], cluster: ClusterSettings) -> ExpectedRate | None:
    """Predict the rate of a recipe's job, without its data and without a request.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: overrides of one run.
        cluster: where it is to run.

    Returns:
        None for what cannot be planned: a size that nobody knows, some of a node's GPUs, a network or data of the
        user's own, whose code is not run here, or a network that needs its weights.
    """
    size = _size(cluster)
    if size is None or cluster.processes_per_node not in (None, size.gpus):
        return None
    from azureml_strategy.planning.expected import expect_rate

    try:
        return expect_rate(recipe, overrides, size, cluster.num_nodes)
    except Exception as error:  # an expectation is advice: nothing that is wrong with it may stop a submission
        _log.debug("No rate is expected of the job: %s", error)
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
