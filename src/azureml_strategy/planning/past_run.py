"""What an MLflow run says of its recipe, and the rate to expect of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from azureml_strategy.cluster.redaction import REDACTED
from azureml_strategy.network.vm_sizes import lookup_vm_size
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.expected import expect_rate
from azureml_strategy.tracking.expected import SIZE_TAGS, ExpectedRate, may_expect
from azureml_strategy.tracking.source import OVERRIDES_TAG, RECIPE_TAG

# Sections that say where a run ran. Its batch does not depend on them.
_PLACES = ("output_dir", "resume", "hydra", "job", "cluster", "checkpoint")
_MOST = 1e6  # nodes or devices; a larger number is a mistake
_WORD = re.compile(r"[\w.-]{1,40}")


def expect_run(tags: Mapping[str, str], params: Mapping[str, str], metrics: Mapping[str, float]) -> ExpectedRate | None:
    """Predict the rate of a run that was not submitted with an expectation.

    Args:
        tags: of the MLflow run, with recipe, overrides and VM size.
        params: of it.
        metrics: of it, with nodes, devices and the rate.

    Returns:
        None if it cannot be planned, or if the run says other GPUs, strategy or precision than the plan.
    """
    nodes, devices = (metrics.get(f"summary/{name}", 0.0) for name in ("nodes", "devices"))
    if not (may_expect(tags, metrics) and 0 < nodes < _MOST and 0 < devices < _MOST):
        return None
    try:
        size = lookup_vm_size(next(tags[name] for name in SIZE_TAGS if tags.get(name)))
        found = expect_rate(*logged_recipe(tags, params), size, round(nodes))
    except (PlanError, LookupError, TypeError, ValueError):  # a run of another version, or of another folder
        return None
    strategy = params.get("strategy/_target_", "").rpartition(".")[2]
    ran = (round(devices), strategy, params.get("trainer/precision"))
    same = ran == (found.devices, found.strategy, found.precision)
    return found if same and found.unit == tags.get("throughput.unit") else None


def logged_recipe(tags: Mapping[str, str], params: Mapping[str, str], own: str = "") -> tuple[str, tuple[str, ...]]:
    """The recipe and the overrides that a run was started with, with the batch and the precision that it took.

    Args:
        tags: of the MLflow run. Whoever may write to the store has written them: read what they say with `only_ours`.
        params: of it.
        own: file of a recipe of one's own, which the run may be of; it knows the recipe's name alone.

    Raises:
        PlanError: it was no run of a recipe, or its tags cannot be followed.
    """
    name = tags.get(RECIPE_TAG)
    if not name:
        raise PlanError("it was no run of a recipe, so what it computed is not known.")
    if not _WORD.fullmatch(name):
        raise PlanError(f"its recipe has the name {name[:60]!a}.")
    stem = re.sub(r"^.*[/\\]|\.yaml$", "", own)
    try:
        overrides = shlex.split(tags.get(OVERRIDES_TAG, ""))
    except ValueError as error:
        raise PlanError(f"its overrides cannot be read ({error}).") from error
    return own if own and name == stem else name, (*_about_training(overrides), *_resolved(params))


def _about_training(overrides: Sequence[str]) -> Iterator[str]:
    for each in overrides:
        section = re.split(r"[./@=]", each.lstrip("+~"))[0]
        if section not in _PLACES and REDACTED not in each:
            yield each


def _resolved(params: Mapping[str, str]) -> Iterator[str]:
    """The run's batch and precision, which may depend on where it ran."""
    for key in ("trainer.precision", "data.batch_size"):
        value = params.get(key.replace(".", "/"), "")
        if _WORD.fullmatch(value) and value != "None":
            yield f"++{key}={value}"
