"""The Azure ML job that this process belongs to, and what one of its nodes costs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_PREFIX = "AZUREML_STRATEGY_PRICE_"
# Variables with the number of a node's GPUs, of several back ends.
_GPU_COUNTS = (
    "GPU_PER_NODE_COUNT",
    "AZ_BATCHAI_NUM_GPUS_PER_NODE",
    "AZ_BATCHAI_GPU_COUNT",
    "AMLARC_NUM_GPU_PER_WORKER",
)


@dataclass(frozen=True)
class Job:
    """What a process knows of its job from Azure ML's variables. An attribute is None if no variable gives it.

    Attributes:
        run_id: the job's name, which is also the id of its MLflow run. It stays the same after a retry.
        root_run_id: for a step of a pipeline, the run id of the pipeline; else the job's own.
        experiment: experiment name.
        workspace: workspace name.
        resource_group: resource group of the workspace.
        subscription: subscription id; `repr` does not show it.
        compute: name of the compute cluster.
        vm_size: VM size of the nodes, such as `Standard_ND96isr_H100_v5`.
        priority: `dedicated` or `low-priority`.
        attempt: number of previous attempts, 0 in the first one.
        gpus_per_node: GPUs of one node.
    """

    run_id: str
    root_run_id: str
    experiment: str | None
    workspace: str | None
    resource_group: str | None
    subscription: str | None = field(repr=False)
    compute: str | None
    vm_size: str | None
    priority: str | None
    attempt: int
    gpus_per_node: int | None

    @property
    def studio_url(self) -> str | None:
        """The job's page in Azure ML studio."""
        if not (self.subscription and self.resource_group and self.workspace):
            return None
        scope = f"/subscriptions/{self.subscription}/resourcegroups/{self.resource_group}/workspaces/{self.workspace}"
        return f"https://ml.azure.com/runs/{self.run_id}?wsid={scope}"


def read_job(environ: Mapping[str, str] | None = None) -> Job | None:
    """Read the job of this process; None outside Azure ML.

    An unreadable compute context counts as absent, because a diagnosis must not stop training.

    Args:
        environ: the environment to read; this process's environment by default.
    """
    environ = os.environ if environ is None else environ
    run_id = environ.get("AZUREML_RUN_ID")
    if not run_id:
        return None
    try:
        context = json.loads(environ.get("AZUREML_CR_COMPUTE_CONTEXT", "{}"))
    except ValueError:
        context = {}
    context = context if isinstance(context, dict) else {}
    gpus = [context.get("gpu_count"), *(environ.get(name) for name in _GPU_COUNTS)]
    return Job(
        run_id=run_id,
        root_run_id=environ.get("AZUREML_ROOT_RUN_ID") or run_id,
        experiment=environ.get("AZUREML_ARM_PROJECT_NAME") or environ.get("MLFLOW_EXPERIMENT_NAME"),
        workspace=environ.get("AZUREML_ARM_WORKSPACE_NAME"),
        resource_group=environ.get("AZUREML_ARM_RESOURCEGROUP"),
        subscription=environ.get("AZUREML_ARM_SUBSCRIPTION"),
        compute=_text(context, "readable_cluster_name", "cluster_name") or environ.get("AZ_BATCHAI_CLUSTER_NAME"),
        vm_size=_text(context, "vm_size"),
        priority=_priority(environ, context),
        attempt=_number(context.get("run_attempt_count")) or 0,
        gpus_per_node=next((number for number in map(_number, gpus) if number is not None), None),
    )


def _text(context: Mapping[str, Any], *names: str) -> str | None:
    return next((str(context[name]) for name in names if context.get(name)), None)


def _number(value: object) -> int | None:
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() else None


def _priority(environ: Mapping[str, str], context: Mapping[str, Any]) -> str | None:
    """The compute context has `LowPriority`, `Spot` or `Dedicated`; Azure Batch has a flag."""
    text = (_text(context, "vm_priority") or "").lower().replace("_", "").replace("-", "")
    if text in ("lowpriority", "spot") or environ.get("AZ_BATCH_NODE_IS_DEDICATED", "").lower() == "false":
        return "low-priority"
    dedicated = text in ("dedicated", "regular") or "AZ_BATCH_NODE_IS_DEDICATED" in environ
    return "dedicated" if dedicated else None


@dataclass(frozen=True)
class Price:
    """The price of one node.

    Raises:
        ValueError: the price is negative, infinite or not a number.
    """

    per_hour: float
    currency: str  # ISO 4217 code, such as `USD`
    source: str  # `Azure Retail Prices`, or the key that the user has set
    date: str | None = None  # ISO date on which the source was queried; None for a price that the user has set

    def __post_init__(self) -> None:
        if not 0 <= self.per_hour < math.inf:
            raise ValueError(
                f"{self.source} says {self.per_hour} {self.currency} an hour, which is no price. Give the price of one "
                "node and hour, or null for none."
            )

    def as_variables(self) -> dict[str, str]:
        """Return the environment variables that `read_price` reads."""
        variables = {
            f"{_PREFIX}PER_HOUR": repr(self.per_hour),
            f"{_PREFIX}CURRENCY": self.currency,
            f"{_PREFIX}SOURCE": self.source,
        }
        return variables if self.date is None else variables | {f"{_PREFIX}DATE": self.date}

    def __str__(self) -> str:
        date = f", {self.date}" if self.date else ""
        return f"{self.per_hour:,.10g} {self.currency}/h, {self.source}{date}"


def read_price(environ: Mapping[str, str] | None = None) -> Price | None:
    """Read the price from the variables of the job, by default of this process; None if there is none.

    An unreadable price counts as absent, because it must not stop training.
    """
    environ = os.environ if environ is None else environ
    try:
        return Price(
            per_hour=float(environ[f"{_PREFIX}PER_HOUR"]),
            currency=environ.get(f"{_PREFIX}CURRENCY") or "USD",
            source=environ.get(f"{_PREFIX}SOURCE") or f"{_PREFIX}PER_HOUR",
            date=environ.get(f"{_PREFIX}DATE") or None,
        )
    except (KeyError, ValueError):
        return None


def count(number: float, thing: str) -> str:
    """A number of things: `1 node`, `2,048 processes`."""
    plural = "es" if thing.endswith("s") else "s"
    return f"{number:,.0f} {thing}{plural * (round(number) != 1)}"


def format_money(amount: float) -> str:
    """Format an amount with two decimals; one below 1 with four significant digits."""
    return f"{amount:,.2f}" if amount >= 1 or amount == 0 else f"{amount:.4g}"
