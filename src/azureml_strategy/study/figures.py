"""Reads what one run of a study achieved from its MLflow run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from azureml_strategy.cluster.job import Price
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.study.options import StudyError

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_LONGEST = 300  # characters of a store's error message
_RATE, _PER_DEVICE = "summary/samples_per_second", "summary/samples_per_second_per_device"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one run; None for what the run has not recorded.

    Attributes:
        run_id: id of its MLflow run; empty if there is none.
        name: name of the run.
        nodes: number of nodes that it ran on, or was to run on.
        devices: number of processes, each with a device of its own.
        unit: the name of a sample.
        samples_per_second: over all devices, without warm-up.
        mfu: model FLOPs utilisation, 0 to 1.
        cost_per_million_samples: of all nodes, in `currency`.
        currency: ISO 4217 code.
        transport: what carried the traffic between processes.
        problem: what went wrong; empty if nothing did.
        params: the configuration, as the run recorded it.
    """

    run_id: str = ""
    name: str = ""
    nodes: int | None = None
    devices: int | None = None
    unit: str = "samples"
    samples_per_second: float | None = None
    mfu: float | None = None
    cost_per_million_samples: float | None = None
    currency: str | None = None
    transport: str | None = None
    problem: str = ""
    params: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def per_device(self) -> float | None:
        """Samples per second of one device."""
        return self.samples_per_second / self.devices if self.samples_per_second and self.devices else None

    def priced(self, price: Price | None) -> Figures:
        """Add the cost at this price of a node, unless the run has recorded one."""
        known = self.cost_per_million_samples is not None
        if known or price is None or self.nodes is None or not self.samples_per_second:
            return self
        cost = 1e6 * self.nodes * price.per_hour / 3600 / self.samples_per_second
        return replace(self, cost_per_million_samples=cost, currency=price.currency)


def read_figures(client: MlflowClient, run_id: str, nodes: int | None = None) -> Figures:
    """Read the figures of a run.

    Args:
        client: of the store that has the run.
        run_id: its id.
        nodes: number of nodes that it was to run on, for a run that ended before it recorded the number.

    Raises:
        StudyError: the store has no such run, or does not answer.
    """
    run = _get_run(client, run_id)
    metrics, tags = run.data.metrics, run.data.tags
    rate = metrics.get(_RATE)
    return Figures(
        run_id=run_id,
        name=str(run.info.run_name),
        nodes=_whole(metrics.get("summary/nodes")) or nodes,
        devices=_whole(metrics.get("summary/devices")) or _whole(rate / metrics[_PER_DEVICE] if rate else None),
        unit=tags.get("throughput.unit", "samples"),
        samples_per_second=rate,
        mfu=metrics.get("summary/mfu"),
        cost_per_million_samples=metrics.get("cost/per_million_samples") if rate else None,
        currency=tags.get("cost.currency"),
        transport=tags.get("network.transport"),
        problem=_problem(run, measured=rate is not None),
        params=run.data.params,
    )


def _get_run(client: MlflowClient, run_id: str) -> Run:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise StudyError(
                f"The store has no run {run_id}. Name the one that has it with --store URI, --store azureml for the "
                "workspace's, or MLFLOW_TRACKING_URI."
            ) from error
        said = redact_text(" ".join(str(error).split()))[:_LONGEST]
        raise StudyError(
            f"The store did not give run {run_id}: {said}. Check its address, the network and your rights, and read "
            f"what was measured with --runs {run_id} later."
        ) from error


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def _problem(run: Run, measured: bool) -> str:
    if run.info.status != "FINISHED":
        return str(run.info.status).lower()
    return "" if measured else "no throughput: every step was warm-up, or no RunReport logged it"
