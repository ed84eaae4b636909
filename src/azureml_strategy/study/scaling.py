"""Compares runs of different sizes with the smallest one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from azureml_strategy.study.figures import Figures
from azureml_strategy.study.options import StudyError

# Sections of a recipe that may differ between sizes: they say where it ran.
_PLACES = ("cluster", "job", "trainer/num_nodes", "trainer/devices")


@dataclass(frozen=True)
class Row:
    """A run in comparison with the smallest.

    Attributes:
        figures: what it achieved.
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
        rows: one for each run.
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
        return next((row.figures.currency for row in self.rows if _costs(row.figures)), None)

    @property
    def complete(self) -> bool:
        """Whether every run succeeded and was measured."""
        return not any(row.figures.problem for row in self.rows)


def compare(runs: Sequence[Figures]) -> Scaling:
    """Compare every run with the smallest that was measured.

    Raises:
        StudyError: the runs count different things, or have costs in different currencies.
    """
    measured = [run for run in runs if run.samples_per_second and run.devices]
    _refuse_mixture("count", {run.unit for run in measured})
    _refuse_mixture("have costs in", {run.currency or "" for run in measured if _costs(run)})
    base = min(measured, key=lambda run: (run.devices, -(run.samples_per_second or 0)), default=None)
    ordered = sorted(runs, key=lambda run: (run.nodes or 0, run.devices or 0, run.name))
    return Scaling([_row(run, base) for run in ordered], base, dict(_differences(measured)))


def _row(run: Figures, base: Figures | None) -> Row:
    if base is None or not (run.samples_per_second and run.devices and base.samples_per_second and base.devices):
        return Row(run, None, None)
    speed_up = run.samples_per_second / base.samples_per_second
    return Row(run, speed_up, speed_up / (run.devices / base.devices))


def _costs(run: Figures) -> bool:
    return run.cost_per_million_samples is not None


def _refuse_mixture(verb: str, values: set[str]) -> None:
    if len(values) > 1:
        raise StudyError(f"The runs {verb} {' and '.join(sorted(values))}: they are not one study. Leave some out.")


def _differences(runs: Sequence[Figures]) -> Iterator[tuple[str, list[str]]]:
    """Settings in which the runs differ apart from size: such runs do not show scaling alone."""
    for name in sorted({name for run in runs for name in run.params}):
        values = sorted({run.params.get(name, "(not set)") for run in runs})
        is_place = any(name == place or name.startswith(f"{place}/") for place in _PLACES)
        # Paths may differ: the folders of a job contain its name.
        if len(values) > 1 and not is_place and not all(value.startswith("/") for value in values):
            yield name, values
