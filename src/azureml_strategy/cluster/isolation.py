"""A fault inside a callback that nobody asked for costs a warning, never the run."""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from lightning.pytorch import Callback, Trainer

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.redaction import redact_text

log = logging.getLogger(__name__)
Value = TypeVar("Value")
# Kept by an exception that a callback lets through on purpose.
_INTENDED = "_azureml_strategy_intended"


class IsolatedCallback(Callback):
    """A callback whose own faults do not end the run.

    Each public method of a subclass is wrapped: an unexpected exception becomes one warning, with its traceback and
    the switch that leaves the callback out, and the callback does nothing more until the next `setup`. What ends a run
    on purpose passes: LaunchError, whatever is not an `Exception` (SIGTERMException, SystemExit, KeyboardInterrupt),
    and what was raised inside of `passed_through`.

    A method that takes part in a collective must do so whatever happens on its rank: see `Attempt`.

    Attributes:
        switch: the environment variable that leaves this callback out when it is `off`.
    """

    switch: ClassVar[str]
    _inert = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in list(vars(cls).items()):
            if inspect.isfunction(member) and not name.startswith("_"):
                setattr(cls, name, _isolated(member))

    def _give_up(self, trainer: Trainer | None) -> None:
        """Undo what would act on the run without the callback's further help.

        Args:
            trainer: whose run it is; None where the method that failed is not told.
        """

    def _report(self, method: str, fault: Exception) -> None:
        log.warning(fault_text(f"{type(self).__name__}.{method}", self.switch, fault))


class Attempt(Generic[Value]):
    """What this rank could do, or why it could not: something to gather, where its absence would hold up the others.

    Args:
        action: what to do.

    Attributes:
        value: what it returned; None where it has failed.
        fault: what it raised, if that was an `Exception`.

    Raises:
        LaunchError: the action did.
    """

    def __init__(self, action: Callable[[], Value]) -> None:
        self.value: Value | None = None
        self.fault: Exception | None = None
        try:
            self.value = action()
        except LaunchError:
            raise
        except Exception as fault:
            self.fault = fault

    def settle(self) -> None:
        """Raise the fault, if there was one, now that the other ranks know."""
        if self.fault is not None:
            raise self.fault


def passed_through(action: Callable[[], None]) -> None:
    """Run code of the user's inside of a callback of ours: what it raises is meant for the run.

    Args:
        action: what to run.
    """
    try:
        action()
    except Exception as error:
        setattr(error, _INTENDED, True)
        raise


def fault_text(where: str, switch: str, fault: Exception) -> str:
    """The warning for a fault.

    Args:
        where: what has failed.
        switch: the environment variable that leaves it out.
        fault: what was raised.
    """
    trace = redact_text("".join(traceback.format_exception(fault)))
    return (
        f"{where} of azureml-strategy has failed. The run goes on without it. "
        f"To leave it out from the start, set {switch}=off.\n{trace}"
    )


def _isolated(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def run(self: IsolatedCallback, *arguments: Any, **named: Any) -> None:
        if method.__name__ == "setup":
            self._inert = False  # all ranks begin anew together
        if self._inert:
            return
        try:
            method(self, *arguments, **named)
        except LaunchError:
            raise
        except Exception as fault:
            if hasattr(fault, _INTENDED):
                raise
            self._inert = True
            self._report(method.__name__, fault)
            trainer = next((each for each in (*arguments, *named.values()) if isinstance(each, Trainer)), None)
            undone = Attempt(lambda: self._give_up(trainer))
            if hasattr(undone.fault, _INTENDED):
                undone.settle()
            if undone.fault is not None:
                log.debug("It could not be undone either.", exc_info=undone.fault)

    return run
