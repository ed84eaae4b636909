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
    """Reports each action on the training thread to a breakdown, and passes everything on to the script's own profiler.

    Attributes that a script reads or sets here are read or set there. For `isinstance`, this object is of that
    profiler's class, too.
    """

    _wrapped: Profiler
    _breakdown: Breakdown
    _is_alone: bool

    def __init__(self, wrapped: Profiler, breakdown: Breakdown) -> None:
        # Not the base class's constructor, so that `dirpath` and `filename` are those of the script's own profiler.
        vars(self).update(_wrapped=wrapped, _breakdown=breakdown, _is_alone=type(wrapped) is PassThroughProfiler)
        if self._is_alone:  # the usual case, without a further call
            vars(self)["profile"] = breakdown.span

    @property  # type: ignore[misc] # a callback may test the class of the Trainer's profiler
    def __class__(self) -> type[Profiler]:  # type: ignore[override]
        return type(self._wrapped)

    @override
    def __reduce__(self) -> tuple[type[SpanProfiler], tuple[Profiler, Breakdown]]:
        return SpanProfiler, (self._wrapped, self._breakdown)

    @override
    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override] # not a generator
        if not self._breakdown.is_here:
            return self._wrapped.profile(action_name)
        return self._both(self._breakdown.line(action_name))

    @override
    def start(self, action_name: str) -> None:
        if self._breakdown.is_here:
            self._breakdown.line(action_name).__enter__()
        if not self._is_alone:
            self._wrapped.start(action_name)

    @override
    def stop(self, action_name: str) -> None:
        if not self._is_alone:
            self._wrapped.stop(action_name)
        if self._breakdown.is_here:
            self._breakdown.line(action_name).__exit__()

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self._wrapped.setup(stage, local_rank, log_dir)

    @override
    def teardown(self, stage: str | None) -> None:
        self._wrapped.teardown(stage)

    @override
    def summary(self) -> str:
        return self._wrapped.summary()

    @override
    def describe(self) -> None:
        self._wrapped.describe()

    def __del__(self) -> None:
        """Do nothing: the base class would tear down the script's own profiler before it has described its run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)

    @contextmanager
    def _both(self, line: Line) -> Iterator[str]:
        with line as name, self._wrapped.profile(name):
            yield name


def install(trainer: Trainer, breakdown: Breakdown) -> None:
    """Make a Trainer report its actions to a breakdown."""
    remove(trainer)
    trainer.profiler = SpanProfiler(trainer.profiler, breakdown)  # type: ignore[attr-defined]


def user_profiler(trainer: Trainer) -> Profiler:
    """The profiler that a script gave its Trainer."""
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    return profiler._wrapped if isinstance(profiler, SpanProfiler) else profiler


def remove(trainer: Trainer) -> None:
    """Give a Trainer its own profiler back."""
    trainer.profiler = user_profiler(trainer)  # type: ignore[attr-defined]
