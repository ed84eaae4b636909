"""Says before a job is sent what is uploaded for it, what it costs, and which names must exist in the workspace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from azureml_strategy.cluster.job import Price
from azureml_strategy.jobs.inputs import asset_of
from azureml_strategy.jobs.plan import JobPlan
from azureml_strategy.jobs.snapshot import describe_files

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command


def summarize(plan: JobPlan, job: Command, price: Price | None) -> Iterator[str]:
    """Yield a line each about uploads beside the code, the price and the names that must exist.

    Args:
        plan: what the job runs.
        job: the same, rendered.
        price: of one node; None if it is not known.
    """
    build = getattr(job.environment, "build", None)
    if build is not None and build.path:
        # A user's own folder of a build is named by the line about the environment.
        yield f"image: built by Azure ML from {_describe(Path(build.path))}, unless the workspace has it already"
    for name, each in plan.job.inputs.items():
        if each.path and Path(each.path).exists():
            yield f"input {name}: {os.path.relpath(each.path)}, {_describe(Path(each.path))}"
    if price is not None:
        nodes = plan.cluster.num_nodes
        total = f", {nodes * price.per_hour:,.10g} {price.currency}/h for {nodes} nodes" if nodes > 1 else ""
        yield f"price: a node {price}{total}"
    names = list(needed_names(plan, job))
    if names:
        yield f"the workspace must have: {', '.join(names)} (azureml-strategy submit ... --check asks)"


def needed_names(plan: JobPlan, job: Command) -> Iterator[str]:
    """The names in the workspace without which Azure would refuse the job, each with its kind."""
    if job.compute:
        yield f"compute {str(job.compute).removeprefix('azureml:')}"
    for each in plan.job.inputs.values():
        if asset_of(each) is not None:
            yield f"data {each.path}"
    if isinstance(job.environment, str):
        yield f"environment {job.environment}"


def _describe(path: Path) -> str:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return describe_files(len(files), sum(each.stat().st_size for each in files))
