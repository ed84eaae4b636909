"""The command that submits a candidate, and the overrides by which a recipe becomes it."""

from __future__ import annotations

import shlex
from functools import lru_cache

from azureml_strategy.planning.candidates import Candidate
from azureml_strategy.planning.workload import Workload
from azureml_strategy.training.checks import compose_recipe
from azureml_strategy.training.recipes import find_recipe
from azureml_strategy.training.resolvers import register_resolvers

_WHERE = ("cluster", "cluster.vm_size", "cluster.num_nodes", "cluster.processes_per_node")


def recipe_overrides(workload: Workload, candidate: Candidate) -> list[str]:
    """The user's overrides and those of the candidate's strategy, without where it runs."""
    how, words = candidate.how, list[str]()
    same = how.strategy == workload.strategy
    if not same:
        words.append(f"strategy={how.strategy}")
    if how.strategy == "model_parallel":
        words.append(f"strategy.tensor_parallel_size={how.tensor_parallel_size}")
    if how.strategy == "pipeline":
        words.append(f"strategy.num_stages={how.num_stages}")
    if how.strategy == "local_sgd" and candidate.is_scaled_out and candidate.size.infiniband:
        words.append("strategy.allow_infiniband=true")  # see refuse_infiniband in strategies/local_sgd
    numbers = {"trainer.num_nodes": candidate.nodes, "trainer.devices": candidate.prediction.gpus // candidate.nodes}
    words += [f"{key}={numbers[key]}" for key in workload.pinned]
    chosen = {each.partition("=")[0] for each in words} | {*_WHERE, *numbers}
    kept = [each for each in workload.overrides if _stays(each, chosen, same)]
    foreign = () if same else _foreign_keys(workload.recipe, tuple(kept), how.strategy)
    return [*kept, *words, *(f"~strategy.{key}" for key in foreign)]


def _stays(override: str, chosen: set[str], same_strategy: bool) -> bool:
    key = override.partition("=")[0].lstrip("+~")
    return key not in chosen and (same_strategy or not key.startswith("strategy."))


@lru_cache(maxsize=64)
def _foreign_keys(recipe: str, overrides: tuple[str, ...], strategy: str) -> tuple[str, ...]:
    """Settings that a recipe gives its own strategy and that another one does not have."""
    register_resolvers()
    choice = f"strategy={strategy}"
    given = compose_recipe(find_recipe(recipe), [*overrides, choice]).strategy
    known = compose_recipe(find_recipe("base_run"), [choice]).strategy
    return tuple(key for key in given if key not in known)


def submit_command(workload: Workload, candidate: Candidate) -> str:
    """The command that submits a candidate."""
    placed = [f"cluster={candidate.size.short_name}"]
    if candidate.nodes > 1:
        placed.append(f"cluster.num_nodes={candidate.nodes}")
    if candidate.nodes > 1 and not candidate.size.infiniband:
        placed.append("cluster.allow_ethernet=true")
    if workload.gpus_per_node is not None:
        placed.append(f"cluster.processes_per_node={workload.gpus_per_node}")
    overrides = recipe_overrides(workload, candidate)
    if candidate.tier != "dedicated":
        overrides = [each for each in overrides if not each.startswith("cluster.tier=")]
        placed.append(f"cluster.tier={candidate.tier}")
    return shlex.join(["azureml-strategy", "submit", workload.recipe, *overrides, *placed])
