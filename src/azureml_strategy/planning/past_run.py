"""The rate to expect of a recipe's run that exists, from what its MLflow run says of itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from azureml_strategy.network.vm_sizes import lookup_vm_size
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.expected import expect_rate, has_own_network
from azureml_strategy.tracking.expected import SIZE_TAGS, ExpectedRate, may_expect
from azureml_strategy.tracking.source import OVERRIDES_TAG, RECIPE_TAG


def expect_run(tags: Mapping[str, str], params: Mapping[str, str], metrics: Mapping[str, float]) -> ExpectedRate | None:
    """Predict the rate of a run that was not submitted with an expectation.

    Args:
        tags: of the MLflow run, with recipe, overrides and VM size.
        params: of it, with the classes of the network.
        metrics: of it, with nodes, devices and the rate.

    Returns:
        None if it cannot be planned, or if the run says other GPUs, strategy or precision than the plan.
    """
    nodes, devices = metrics.get("summary/nodes"), metrics.get("summary/devices")
    targets = [text for name, text in params.items() if name.startswith("model/") and name.endswith("_target_")]
    if not (may_expect(tags, metrics) and nodes and devices and has_own_network(targets)):
        return None
    try:
        size = lookup_vm_size(next(tags[name] for name in SIZE_TAGS if tags.get(name)))
        found = expect_rate(tags[RECIPE_TAG], shlex.split(tags.get(OVERRIDES_TAG, "")), size, round(nodes))
    except (PlanError, LookupError, TypeError, ValueError):  # a run of another version, or of another folder
        return None
    strategy = params.get("strategy/_target_", "").rpartition(".")[2]
    ran = (round(devices), strategy, params.get("trainer/precision"))
    same = ran == (found.devices, found.strategy, found.precision)
    return found if same and found.unit == tags.get("throughput.unit") else None
