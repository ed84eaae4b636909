"""The rate that the planner expected of a run: how it comes into the job, and what the measured rate is beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from azureml_strategy.cluster.emulated import EMULATED_TAG
from azureml_strategy.cluster.environ import EXPECTED_RATE_VARIABLE
from azureml_strategy.cluster.job import count
from azureml_strategy.tracking.source import RECIPE_TAG
from azureml_strategy.tracking.verdict import NAMES, PHASES, Verdict

EXPECTED_RATE_TAG = "azureml_strategy.expected_rate"
"""Tag of an MLflow run whose rate can be held against the one that was expected, with the text of `ExpectedRate`."""
EXPECTED_RATE_METRIC = "summary/expected_samples_per_second"
SIZE_TAGS = ("azureml_strategy.vm_size", "network.vm_size")
"""Tags with the VM size of a run's nodes."""
LEAST_SHARE = 0.7
"""A run that reaches less of the expected rate is slow: most predictions are within 30 % (docs/plan.md)."""
# Batches at the end of an epoch are smaller, so that the mean of the steps is not exactly the planned one.
_SAME_STEP = 0.05
_LARGEST = 1e15  # no machine is as fast; larger numbers of a text are mistakes
_DIGITS = 6
LEAST_STEPS = 20
"""Measured steps of a run that can be held against a plan: fewer are a try, or profiled, or just begun."""


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """What a rate depends on beside the network. Only runs of the same setting can be compared.

    Attributes:
        unit: the name of what is counted, such as images.
        samples_per_step: of them in an optimizer step, over all devices.
        vm_size: of the nodes; empty if it is not known.
        gpu: model of each device, such as `H100`; empty for a CPU and for an unknown one.
        nodes: number of nodes.
        devices: number of processes, each with a GPU.
        strategy: class of the strategy.
        precision: Lightning's name.
    """

    unit: str
    samples_per_step: float
    vm_size: str
    gpu: str
    nodes: int
    devices: int
    strategy: str
    precision: str


@dataclass(frozen=True, kw_only=True)
class ExpectedRate(RunSetting):
    """The rate that is expected of a run.

    Attributes:
        samples_per_second: over all devices.
        low: the lower end of the range in which it is expected.
        high: the upper end.

    Raises:
        ValueError: a number is not positive, not finite or out of order.
        TypeError: a text is a number, or a number a text.
    """

    samples_per_second: float
    low: float
    high: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "str" and not isinstance(value, str):
                raise TypeError(f"{each.name} is {value!r}, which is no text.")
            if each.type != "str" and not 0 < value < _LARGEST:
                raise ValueError(f"{each.name} is {value}. Give a number above 0.")
        if not self.low <= self.samples_per_second <= self.high:
            raise ValueError(f"{self.samples_per_second} is not between {self.low} and {self.high}.")

    def to_text(self) -> str:
        """One line of JSON, which `parse_expected_rate` reads."""
        rounded = {
            name: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }
        return json.dumps(rounded)

    @property
    def place(self) -> str:
        """The nodes: `2 x Standard_ND96isr_H100_v5`."""
        return f"{self.nodes} x {self.vm_size}"

    @property
    def text(self) -> str:
        """The rate with its range: `2,400 images/s (1,900 to 3,100)`."""
        return f"{self.samples_per_second:,.0f} {self.unit}/s ({self.low:,.0f} to {self.high:,.0f})"

    def applies_to(self, run: RunSetting) -> bool:
        """Whether a run is of the setting for which this was planned. Nothing is, whose GPU is not known."""
        same = ("unit", "gpu", "nodes", "devices", "strategy", "precision")
        step = run.samples_per_step / self.samples_per_step
        return (
            all(getattr(run, name) == getattr(self, name) for name in same)
            and run.vm_size.lower() in ("", self.vm_size.lower())
            and abs(step - 1) <= _SAME_STEP
        )


def parse_expected_rate(text: str) -> ExpectedRate | None:
    """Read the text of `ExpectedRate.to_text`; None for any other, because a comparison must not stop training."""
    try:
        return ExpectedRate(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None


def expected_in_job(environ: Mapping[str, str]) -> ExpectedRate | None:
    """The rate that `submit` expected of this job; None if it said none."""
    return parse_expected_rate(environ.get(EXPECTED_RATE_VARIABLE, ""))


def expected_of_run(tags: Mapping[str, str]) -> ExpectedRate | None:
    """The expected rate with which a run was compared at its end, by its tags.

    None for an emulated run, and for one that was resumed on other nodes than those of the comparison.
    """
    found = None if tags.get(EMULATED_TAG) == "true" else parse_expected_rate(tags.get(EXPECTED_RATE_TAG, ""))
    if found is None:
        return None
    own = {f"azureml_strategy.{name}": str(getattr(found, name)) for name in ("nodes", "devices")}
    return found if all(tags.get(name, value) == value for name, value in own.items()) else None


def may_expect(tags: Mapping[str, str], metrics: Mapping[str, float]) -> bool:
    """Whether the planner may know the rate of a run that is over, by its tags and metrics.

    It is that of a recipe on a VM size and on GPUs with an MFU, which known GPUs alone have, and was not emulated.
    """
    has_size = any(tags.get(name) for name in SIZE_TAGS)
    return has_size and RECIPE_TAG in tags and "summary/mfu" in metrics and tags.get(EMULATED_TAG) != "true"


@dataclass(frozen=True)
class RateCheck:
    """A measured rate beside the expected one.

    Attributes:
        expected: what was planned.
        measured: samples per second over all devices.
    """

    expected: ExpectedRate
    measured: float

    @property
    def share(self) -> float:
        """What part of the expected rate was reached."""
        return self.measured / self.expected.samples_per_second

    @property
    def error(self) -> float:
        """The prediction's error: 0.1 if it was 10 % above what was measured."""
        return self.expected.samples_per_second / self.measured - 1

    @property
    def is_slow(self) -> bool:
        """Whether the run reached less than `LEAST_SHARE` of what was expected."""
        return self.share < LEAST_SHARE

    @property
    def row(self) -> str:
        """What was expected and what part of it was reached."""
        return f"{self.expected.text} of {self.expected.place}; {self.share:.0%} of it"

    def sentence(self, verdict: Verdict) -> str:
        """What was expected, what was measured, and where to look; empty for a run that is fast enough."""
        if not self.is_slow:
            return ""
        unit, expected = self.expected.unit, self.expected
        return (
            f"{self.measured:,.0f} {unit}/s are {self.share:.0%} of what {expected.place} should do, below "
            f"{LEAST_SHARE:.0%}: the planner expected {expected.text}. {_where_to_look(verdict, expected)}"
        )


def _where_to_look(verdict: Verdict, expected: ExpectedRate) -> str:
    if verdict.part in NAMES or verdict.part in PHASES or verdict.part == "slow_rank":
        what = {**PHASES, **NAMES, "slow_rank": "a slow rank"}[verdict.part]
        return f"Look first at what it waits for most: {what} ({verdict.advice[0].share:.0%} of its time)."
    tools = "`azureml-strategy doctor`"
    if expected.nodes > 1:
        tools += f" and `azureml-strategy bench` on {count(expected.nodes, 'node')}"
    return (
        "It waits for nothing that was measured: check clocks and health of the GPUs and links by "
        f"{tools}, and whether it compiles."
    )
