"""Keeps faults of the callbacks that every Trainer gets from ending the run: each becomes a warning."""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from lightning.pytorch import Callback, Trainer
from torch import nn

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.redaction import redact_text

log = logging.getLogger(__name__)
Value = TypeVar("Value")
Method = TypeVar("Method", bound=Callable[..., Any])
# Set on an exception that a callback lets through on purpose.
_INTENDED = "_azureml_strategy_intended"
# Set on a method that isolates by itself what may fail.
_NOT_ISOLATED = "_azureml_strategy_not_isolated"


def not_isolated(method: Method) -> Method:
    """Do not wrap a public method that runs at each step and mostly does nothing.

    The wrapper would take some microseconds of each step, more than such a method. What may fail in it must be
    `isolated`.
    """
    setattr(method, _NOT_ISOLATED, True)
    return method


def isolated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the faults of a private method of `Isolated` from ending the run. Public methods are isolated anyway."""
    starts = method.__name__ == "setup"

    @functools.wraps(method)
    def run(self: Isolated, *arguments: Any, **named: Any) -> Any:
        if starts:
            self._inert = False  # all ranks start again together
        if self._inert:
            return None
        try:
            return method(self, *arguments, **named)
        except LaunchError:
            raise
        except Exception as fault:
            if hasattr(fault, _INTENDED):
                raise
            self._inert = True
            self._report(method.__name__, fault)
            trainer = next((each for each in (*arguments, *named.values()) if isinstance(each, Trainer)), None)
            undone = CapturedResult(lambda: self._give_up(trainer))
            if hasattr(undone.fault, _INTENDED):
                undone.reraise()
            if undone.fault is not None:
                log.debug("It could not be undone either.", exc_info=undone.fault)
            return None

    return run


class Isolated:
    """A part of a run whose own faults do not end it.

    Each public method of a subclass is wrapped unless it is `not_isolated`, also one that it inherits from a class that
    is not isolated. An unexpected exception becomes one warning, with its traceback and the switch that disables the
    part, and the part does nothing more until the next `setup`. Exceptions that end a run on purpose pass through:
    LaunchError, all that are not an `Exception` (SIGTERMException, SystemExit, KeyboardInterrupt), and those raised
    inside `run_user_code`.

    A method with a collective must take part in it even if something fails on its rank: see `CapturedResult`.

    Attributes:
        switch: the environment variable that disables this part when it is `off`.
    """

    switch: ClassVar[str]
    _inert = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in dir(cls):
            owner = next(each for each in cls.__mro__ if name in vars(each))
            member = vars(owner)[name]
            is_method = inspect.isfunction(member) and not name.startswith("_")
            # Methods of another `Isolated` are wrapped there, and those of Lightning's `Callback` do nothing.
            is_new = owner is cls or not (owner is Callback or issubclass(owner, Isolated))
            if is_method and is_new and not hasattr(member, _NOT_ISOLATED):
                setattr(cls, name, isolated(member))

    def _give_up(self, trainer: Trainer | None) -> None:
        """Undo what would otherwise still act on the run after the callback has stopped working.

        The Trainer is None if the method that failed did not get it as an argument.
        """

    def _report(self, method: str, fault: Exception) -> None:
        log.warning(fault_text(f"{type(self).__name__}.{method}", self.switch, fault))


class IsolatedCallback(Isolated, Callback):
    """A callback of a Trainer whose own faults do not end the run."""

    @property
    def log(self) -> Callable[..., None]:
        """The LightningModule's `log`, which the Trainer assigns to every callback."""
        return self._log

    @log.setter
    def log(self, log: Callable[..., None]) -> None:
        # The Trainer assigns `log` as the first act of a run. No hook runs before it joins the process group and opens
        # the runs of its loggers.
        self._log = log
        module: Any = getattr(log, "__self__", None)
        if isinstance(module, nn.Module):
            trainer: Any = module.trainer
            self.before_run(trainer)

    def before_run(self, trainer: Trainer) -> None:
        """Act before the Trainer joins the process group and uses its loggers.

        `setup` must do the same if this was not called, in case a later Lightning assigns `log` at another time.
        """


class CapturedResult(Generic[Value]):
    """Runs an action and keeps its result or its exception, so that this rank still reaches the gather that follows.

    A rank that raised before the gather would make the others wait for it. A `LaunchError` is raised all the same.
    """

    def __init__(self, action: Callable[[], Value]) -> None:
        self.value: Value | None = None  # None if the action failed
        self.fault: Exception | None = None
        try:
            self.value = action()
        except LaunchError:
            raise
        except Exception as fault:
            self.fault = fault

    def reraise(self) -> None:
        """Raise the fault, if any. Call it after the gather, when the other ranks know of it."""
        if self.fault is not None:
            raise self.fault


def run_user_code(action: Callable[[], None]) -> None:
    """Run the user's code inside one of our callbacks: its exceptions end the run, as the user intends."""
    try:
        action()
    except Exception as error:
        setattr(error, _INTENDED, True)
        raise


def fault_text(where: str, switch: str, fault: Exception) -> str:
    """Return the warning for a fault of what a switch disables, with its traceback and without secrets."""
    trace = redact_text("".join(traceback.format_exception(fault)))
    return (
        f"{where} of azureml-strategy has failed. The run goes on without it. "
        f"To leave it out from the start, set {switch}=off.\n{trace}"
    )
