"""The table at the end of a sweep on this machine: what each run changed, its result, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.tracking.tables import print_table

_DONE = "done"
# Looked for where nobody logs `checkpoint.monitor`.
_RESULTS = ("val/loss", "train/loss")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        overrides: what it changed, separated by spaces.
        metric: name of its result; empty if it has none.
        value: of that metric.
        state: `done`, or the first line of the error with which it ended.
    """

    overrides: str
    metric: str
    value: float | None
    state: str

    @classmethod
    def done(cls, overrides: str, config: DictConfig, metrics: Mapping[str, float]) -> SweepRun:
        """A run that has ended well; its result is what ranks its checkpoints, or its loss.

        Args:
            overrides: what it changed.
            config: of the run.
            metrics: of its last epoch, by name.
        """
        monitor = OmegaConf.select(config, "checkpoint.monitor", throw_on_missing=False)
        name = next((each for each in (monitor, *_RESULTS) if each in metrics), "")
        return cls(overrides, name, metrics.get(name), _DONE)

    @classmethod
    def failed(cls, overrides: str, error: BaseException) -> SweepRun:
        """A run that an error has ended."""
        said = redact_text(str(error)).strip().partition("\n")[0]
        return cls(overrides, "", None, f"{type(error).__name__}: {said}" if said else type(error).__name__)


def print_sweep(runs: list[SweepRun]) -> None:
    """Print the table, in the order in which the runs came."""
    table = Table()
    names = list(dict.fromkeys(each.metric for each in runs if each.metric))
    table.add_column("run", justify="right")
    table.add_column("overrides", overflow="fold")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("state", overflow="fold")
    for number, each in enumerate(runs):
        values = ["" if each.metric != name else f"{each.value:.5g}" for name in names]
        table.add_row(str(number), each.overrides, *values, each.state)
    print()
    print_table(table, width=120)
