"""The one error of a launch, and the switches of what looks after one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Each leaves out one of the callbacks that every Trainer of a job gets, when it is `off`. The guard's is for Trainers
# that are meant to train alone in each process, as in a parallel job.
GUARD_SWITCH = "AZUREML_STRATEGY_GUARD"
HANG_WATCH_SWITCH = "AZUREML_STRATEGY_HANG_WATCH"
TERMINATION_SWITCH = "AZUREML_STRATEGY_TERMINATION"
NETWORK_RECORD_SWITCH = "AZUREML_STRATEGY_NETWORK_RECORD"
DATA_CHECK_SWITCH = "AZUREML_STRATEGY_DATA_CHECK"
# Leaves out all five.
CALLBACKS_SWITCH = "AZUREML_STRATEGY_CALLBACKS"
SWITCHES = (
    *(GUARD_SWITCH, HANG_WATCH_SWITCH, TERMINATION_SWITCH, NETWORK_RECORD_SWITCH, DATA_CHECK_SWITCH),
    CALLBACKS_SWITCH,
)


class LaunchError(RuntimeError):
    """The environment or the Trainer contradicts how the job was launched.

    The message says what was seen (variables and their values), why it cannot be right, and what to type instead.
    """


def switched_off(environ: Mapping[str, str], switch: str) -> bool:
    """Whether a callback's own switch, or the one of all of them, is off.

    Args:
        environ: variables and their values.
        switch: the name of the callback's own.
    """
    return any(environ.get(name, "").strip().lower() == "off" for name in (switch, CALLBACKS_SWITCH))


def seen(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """`NAME='value'` for each name, or `NAME is not set`, joined for an error message."""
    return ", ".join(f"{name}={environ[name]!r}" if name in environ else f"{name} is not set" for name in names)
