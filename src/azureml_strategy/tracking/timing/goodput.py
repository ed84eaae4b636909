"""Tells where the time of one attempt of a run went: start-up, training, validation and so on."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from azureml_strategy.tracking.timing.meters import STEP_PARTS, Part
from azureml_strategy.tracking.timing.steps import Breakdown
from azureml_strategy.tracking.verdict import PHASES

# Optimizer steps done so far. A restarted job learns from it what it does again.
STEPS_DONE = "time/steps"


@dataclass(frozen=True)
class WallClock:
    """Seconds of an attempt, which add up to its wall clock.

    Attributes:
        startup_s: from the start of the process to the first batch.
        training_s: steps, and what the training loop does between them, without `redone_s`.
        validation_s: validation.
        checkpoint_s: checkpoints, as far as training waits for them.
        other_s: after the last step.
        redone_s: training on steps that a previous attempt had done, but not saved.
    """

    startup_s: float = 0.0
    training_s: float = 0.0
    validation_s: float = 0.0
    checkpoint_s: float = 0.0
    other_s: float = 0.0
    redone_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """The sum."""
        return float(sum(getattr(self, each.name) for each in fields(self)))

    @property
    def goodput(self) -> float:
        """Share of the wall clock, 0 to 1, that was spent on steps which the training kept."""
        return self.training_s / self.wall_s if self.wall_s else 0.0

    def as_metrics(self) -> dict[str, float]:
        """The seconds, their sum and the goodput, under `time/`."""
        seconds = {f"time/{each.name}": float(getattr(self, each.name)) for each in fields(self)}
        return {**seconds, "time/wall_s": self.wall_s, "time/goodput": self.goodput}


class GoodputMeter:
    """Where the time of an attempt went so far. Previous attempts had done `steps_before` optimizer steps.

    Attributes:
        may_redo: whether a previous attempt may have done the next steps already.
    """

    def __init__(self, breakdown: Breakdown, steps_before: float = 0.0) -> None:
        self._breakdown = breakdown
        self._steps_before = steps_before
        self._redone_s = 0.0
        self.may_redo = steps_before > 0

    def step_done(self, steps: int) -> None:
        """An optimizer step is done. `steps` counts all steps of the training, with those before its checkpoint."""
        self.may_redo = steps <= self._steps_before
        if self.may_redo:
            self._redone_s = _training_s(self._breakdown.totals)

    def read(self) -> WallClock:
        """The seconds until now."""
        self._breakdown.flush()
        totals = self._breakdown.totals
        return WallClock(
            totals[Part.STARTUP],
            _training_s(totals) - self._redone_s,
            totals[Part.VALIDATION],
            totals[Part.CHECKPOINT],
            totals[Part.ENDING],
            self._redone_s,
        )


def describe(clock: WallClock) -> str:
    """A line for a table: `goodput 81 %: start-up 4 %, validation 10 %, ...`, the larger parts first."""
    names = {**PHASES, "other": "the end"}
    parts = [(getattr(clock, f"{phase}_s"), name) for phase, name in names.items() if phase != "training"]
    shares = sorted(((seconds / clock.wall_s, name) for seconds, name in parts), reverse=True)
    lost = ", ".join(f"{name} {share:.1%}" for share, name in shares if share >= 0.001)
    return f"{clock.goodput:.1%} of {clock.wall_s:,.0f} s" + (f" ({lost})" if lost else "")


def process_age_s(proc: str | Path = "/proc") -> float:
    """Seconds since this process started; 0 on systems that do not show it."""
    if not sys.platform.startswith("linux"):
        return 0.0
    with suppress(OSError, IndexError, ValueError):  # a container may hide it
        # proc(5): field 22 of stat is the start in clock ticks since boot; the name in parentheses may hold spaces.
        stat = (Path(proc) / "self/stat").read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf("SC_CLK_TCK"))
    return 0.0


def _training_s(totals: list[float]) -> float:
    return sum(totals[part] for part in STEP_PARTS)
