"""A profiler for the Trainer that reports what runs to a `Breakdown`, and to the user's own profiler as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from typing_extensions import override

from azureml_strategy.tracking.timing.steps import Breakdown, Line


class SpanProfiler(Profiler):
    """Enters and leaves a line of a breakdown for each action, on the training thread, and passes everything on.

    Args:
        own: the Trainer's profiler until now. Attributes that a script reads or sets here are read or set there. For
            `isinstance`, this object is of that profiler's class, too.
        breakdown: gets the actions.
    """

    own: Profiler
    _breakdown: Breakdown
    _is_alone: bool

    def __init__(self, own: Profiler, breakdown: Breakdown) -> None:
        # Not the base class's constructor: a script that asks for `dirpath` or `filename` gets those of its own.
        vars(self).update(own=own, _breakdown=breakdown, _is_alone=type(own) is PassThroughProfiler)
        if self._is_alone:  # the usual case, with no call in between
            vars(self)["profile"] = breakdown.span

    @property  # type: ignore[misc] # a callback may look whether its profiler is of its class
    def __class__(self) -> type[Profiler]:  # type: ignore[override]
        return type(self.own)

    @override
    def __reduce__(self) -> tuple[type[SpanProfiler], tuple[Profiler, Breakdown]]:
        return SpanProfiler, (self.own, self._breakdown)

    @override
    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override] # not a generator
        if not self._breakdown.is_here:
            return self.own.profile(action_name)
        return self._both(self._breakdown.line(action_name))

    @override
    def start(self, action_name: str) -> None:
        if self._breakdown.is_here:
            self._breakdown.line(action_name).__enter__()
        if not self._is_alone:
            self.own.start(action_name)

    @override
    def stop(self, action_name: str) -> None:
        if not self._is_alone:
            self.own.stop(action_name)
        if self._breakdown.is_here:
            self._breakdown.line(action_name).__exit__()

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.own.setup(stage, local_rank, log_dir)

    @override
    def teardown(self, stage: str | None) -> None:
        self.own.teardown(stage)

    @override
    def summary(self) -> str:
        return self.own.summary()

    @override
    def describe(self) -> None:
        self.own.describe()

    def __del__(self) -> None:
        """Do nothing: the base class would tear the script's own profiler down, which has yet to describe its run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.own, name, value)

    @contextmanager
    def _both(self, line: Line) -> Iterator[str]:
        with line as name, self.own.profile(name):
            yield name


def install(trainer: Trainer, breakdown: Breakdown) -> None:
    """Have a Trainer report to a breakdown what it does."""
    remove(trainer)
    trainer.profiler = SpanProfiler(trainer.profiler, breakdown)  # type: ignore[attr-defined]


def own_profiler(trainer: Trainer) -> Profiler:
    """The profiler that a script gave its Trainer."""
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    return profiler.own if isinstance(profiler, SpanProfiler) else profiler


def remove(trainer: Trainer) -> None:
    """Give a Trainer its own profiler back."""
    trainer.profiler = own_profiler(trainer)  # type: ignore[attr-defined]
