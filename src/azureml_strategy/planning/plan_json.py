"""A plan as JSON: each candidate with its prediction, memory, hours, cost and command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from azureml_strategy.planning.candidates import Candidate, Plan
from azureml_strategy.planning.commands import submit_command
from azureml_strategy.planning.memory import Memory
from azureml_strategy.planning.predict import Prediction
from azureml_strategy.planning.steps import Distribution
from azureml_strategy.planning.workload import Workload


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as values of JSON: each candidate with its prediction, hours, cost and command."""
    return {
        "recipe": plan.workload.recipe,
        "overrides": list(plan.workload.overrides),
        "rank": plan.rank,
        "parameters": plan.workload.network.parameters,
        "flops_per_sample": plan.workload.network.flops,
        "unit": plan.workload.unit,
        "left_out": list(plan.left_out),
        "notes": list(plan.notes),
        "candidates": [_as_values(plan.workload, each) for each in plan.candidates],
    }


def _as_values(workload: Workload, candidate: Candidate) -> Mapping[str, Any]:
    predicted = {each.name: getattr(candidate.prediction, each.name) for each in fields(Prediction)}
    return {
        "vm_size": candidate.size.name,
        "nodes": candidate.nodes,
        "infiniband": candidate.size.infiniband,
        "strategy": {each.name: getattr(candidate.how, each.name) for each in fields(Distribution)},
        **predicted,
        "memory": candidate.memory and {each.name: getattr(candidate.memory, each.name) for each in fields(Memory)},
        "memory_bytes": candidate.memory_bytes,
        "fits": candidate.fits,
        "hours": candidate.hours,
        "cost": candidate.cost,
        "currency": candidate.price.currency if candidate.price else None,
        "command": submit_command(workload, candidate),
    }
