"""Reads what each run of a study achieved from its MLflow run, and compares the runs with the smallest one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from azureml_strategy.cluster.emulated import EMULATED_TAG
from azureml_strategy.cluster.job import Price
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.study.options import StudyError
from azureml_strategy.tracking.expected import ExpectedRate, expected_of_run, may_expect

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_LONGEST = 300  # characters of a store's error message
_RATE, _PER_DEVICE = "summary/samples_per_second", "summary/samples_per_second_per_device"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one run; None for what the run has not recorded.

    Attributes:
        run_id: of its MLflow run; empty if there is none.
        nodes: number of nodes that it ran on, or was to run on.
        devices: number of processes, each with a device of its own.
        unit: the name of a sample.
        samples_per_second: over all devices, without warm-up.
        expected_samples_per_second: what the planner expected.
        expected_low: the lower end of the range in which it expected that.
        expected_high: the upper end.
        mfu: model FLOPs utilisation, 0 to 1.
        cost_per_million_samples: of all nodes, in `currency` (ISO 4217).
        transport: what carried the traffic between processes.
        problem: what went wrong; empty if nothing did.
        error: the run's own words when it failed; empty if they are not known.
        emulated: whether all its nodes shared one machine.
        params: the configuration, as the run recorded it.
    """

    run_id: str = ""
    name: str = ""
    nodes: int | None = None
    devices: int | None = None
    unit: str = "samples"
    samples_per_second: float | None = None
    expected_samples_per_second: float | None = None
    expected_low: float | None = None
    expected_high: float | None = None
    mfu: float | None = None
    cost_per_million_samples: float | None = None
    currency: str | None = None
    transport: str | None = None
    problem: str = ""
    error: str = ""
    emulated: bool = False
    params: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def per_device(self) -> float | None:
        """Samples per second of one device."""
        return self.samples_per_second / self.devices if self.samples_per_second and self.devices else None

    @property
    def prediction_error(self) -> float | None:
        """The error of the expected rate: 0.1 if it is 10 % above the measured one."""
        expected, rate = self.expected_samples_per_second, self.samples_per_second
        return expected / rate - 1 if expected and rate else None

    def priced(self, price: Price | None) -> Figures:
        """Add the cost at this price of a node, unless the run has recorded one."""
        known = self.cost_per_million_samples is not None
        if known or price is None or self.nodes is None or not self.samples_per_second:
            return self
        cost = 1e6 * self.nodes * price.per_hour / 3600 / self.samples_per_second
        return replace(self, cost_per_million_samples=cost, currency=price.currency)


def read_figures(client: MlflowClient, run_id: str, nodes: int | None = None) -> Figures:
    """Read the figures of a run. A run that ended before it recorded its number of nodes was to run on `nodes`.

    Raises:
        StudyError: the store has no such run, or does not answer.
    """
    run = _get_run(client, run_id)
    # Only finite values: a SQL store has the largest float in place of infinity, and the comparison with NaN is False.
    metrics = {name: value for name, value in run.data.metrics.items() if abs(value) < sys.float_info.max}
    tags, rate = run.data.tags, metrics.get(_RATE) or None
    expected = _expected(tags, run.data.params, metrics) if rate else None
    per_device = metrics.get(_PER_DEVICE)
    devices = _whole(metrics.get("summary/devices")) or _whole(rate / per_device if rate and per_device else None)
    return Figures(
        run_id=run_id,
        name=str(run.info.run_name),
        nodes=_whole(metrics.get("summary/nodes")) or nodes,
        devices=devices,
        unit=tags.get("throughput.unit", "samples"),
        samples_per_second=rate,
        expected_samples_per_second=expected.samples_per_second if expected else None,
        expected_low=expected.low if expected else None,
        expected_high=expected.high if expected else None,
        mfu=metrics.get("summary/mfu"),
        cost_per_million_samples=metrics.get("cost/per_million_samples") if rate else None,
        currency=tags.get("cost.currency"),
        transport=tags.get("network.transport"),
        problem=_problem(run, rate, devices),
        emulated=tags.get(EMULATED_TAG) == "true",
        params=run.data.params,
    )


def _expected(tags: Mapping[str, str], params: Mapping[str, str], metrics: Mapping[str, float]) -> ExpectedRate | None:
    """The rate that was expected of a run when it was submitted, else the one that the planner expects of it now."""
    told = expected_of_run(tags)
    if told is not None or not may_expect(tags, metrics):
        return told
    from azureml_strategy.planning.past_run import expect_run

    return expect_run(tags, params, metrics)


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
        why = redact_text(" ".join(str(error).split()))[:_LONGEST]
        raise StudyError(
            f"The store did not give run {run_id}: {why}. Check its address, the network and your rights, and read "
            f"what was measured with --runs {run_id} later."
        ) from error


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def _problem(run: Run, rate: float | None, devices: int | None) -> str:
    if run.info.status != "FINISHED":
        return str(run.info.status).lower()
    logged = run.data.metrics.get(_RATE)
    if logged is None:
        return "no throughput: every step was warm-up, or no RunReport logged it"
    if rate is None:
        return f"no throughput: it logged {logged:g}"
    return "" if devices else f"no number of devices: it logged neither summary/devices nor {_PER_DEVICE}"


# Sections of a recipe that may differ between sizes, because they say where it ran.
_PLACES = ("cluster", "job", "trainer/num_nodes", "trainer/devices")


@dataclass(frozen=True)
class Row:
    """A run in comparison with the smallest.

    Attributes:
        speed_up: its throughput divided by that of the smallest; None if either has none.
        efficiency: the speed-up divided by the ratio of their numbers of devices: 1 is perfect scaling.
    """

    figures: Figures
    speed_up: float | None
    efficiency: float | None


@dataclass(frozen=True)
class Scaling:
    """All runs, from small to large.

    Attributes:
        base: the smallest run with a throughput, and the fastest one of several that small; None if there is none.
        differences: names of recorded settings in which the runs differ, with the values.
    """

    rows: Sequence[Row]
    base: Figures | None
    differences: dict[str, list[str]]

    @property
    def unit(self) -> str:
        """The name of a sample."""
        return self.base.unit if self.base else "samples"

    @property
    def currency(self) -> str | None:
        """Currency of the costs; None if there are none."""
        return next((row.figures.currency for row in self.rows if _has_cost(row.figures)), None)

    @property
    def emulated(self) -> bool:
        """Whether a figure is of nodes that shared one machine."""
        return any(row.figures.emulated for row in self.rows)

    @property
    def failures(self) -> list[str]:
        """The error of each run that failed, with its size, in one sentence each."""
        return [
            f"{row.figures.nodes or '?'} node{'' if row.figures.nodes == 1 else 's'} {row.figures.problem}: "
            f"{row.figures.error}"
            for row in self.rows
            if row.figures.error
        ]

    @property
    def complete(self) -> bool:
        """Whether every run succeeded and was measured."""
        return not any(row.figures.problem for row in self.rows)

    @property
    def measured(self) -> str:
        """How many of the runs are compared; empty if all are."""
        compared = sum(row.efficiency is not None for row in self.rows)
        return f"{compared} of {len(self.rows)} runs measured" if compared < len(self.rows) else ""


def compare(runs: Sequence[Figures]) -> Scaling:
    """Compare every run with the smallest that was measured.

    Raises:
        StudyError: the runs count different things, or have costs in different currencies.
    """
    measured = [run for run in runs if run.samples_per_second and run.devices]
    currencies = {run.currency or "" for run in measured if _has_cost(run)}
    for verb, values in (("count", {run.unit for run in measured}), ("have costs in", currencies)):
        if len(values) > 1:
            raise StudyError(f"The runs {verb} {' and '.join(sorted(values))}: they are not one study. Leave some out.")
    base = min(measured, key=lambda run: (run.devices, -(run.samples_per_second or 0)), default=None)
    ordered = sorted(runs, key=lambda run: (run.nodes or 0, run.devices or 0, run.name))
    return Scaling([_row(run, base) for run in ordered], base, dict(_differences(measured)))


def _row(run: Figures, base: Figures | None) -> Row:
    if base is None or not (run.samples_per_second and run.devices and base.samples_per_second and base.devices):
        return Row(run, None, None)
    speed_up = run.samples_per_second / base.samples_per_second
    return Row(run, speed_up, speed_up / (run.devices / base.devices))


def _has_cost(run: Figures) -> bool:
    return run.cost_per_million_samples is not None


def _differences(runs: Sequence[Figures]) -> Iterator[tuple[str, list[str]]]:
    """Settings in which the runs differ apart from size: such runs do not show scaling alone."""
    for name in sorted({name for run in runs for name in run.params}):
        values = sorted({run.params.get(name, "(not set)") for run in runs})
        is_place = any(name == place or name.startswith(f"{place}/") for place in _PLACES)
        # Paths may differ: the folders of a job contain its name.
        if len(values) > 1 and not is_place and not all(value.startswith("/") for value in values):
            yield name, values


def read_scaling(content: Mapping[str, Any]) -> Scaling:
    """Compare the runs of a study again, from the content of the JSON file that it wrote.

    Raises:
        StudyError: it is no file of a study.
    """
    names = {each.name for each in fields(Figures)}
    try:
        runs = [Figures(**{name: value for name, value in run.items() if name in names}) for run in content["runs"]]
        differences = {str(name): list(values) for name, values in content.get("differences", {}).items()}
        return replace(compare(runs), differences=differences)
    except (TypeError, AttributeError, KeyError) as error:
        raise StudyError(f"This is no JSON file of a study ({type(error).__name__}: {error}).") from None
