"""The one error of this package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Set to `off` where a Trainer is meant to run alone in each process: rank 0 evaluating after training, or the workers
# of a parallel job.
GUARD_SWITCH = "AZUREML_STRATEGY_GUARD"


class LaunchError(RuntimeError):
    """The environment or the Trainer contradicts how the job was launched.

    The message says what was seen (variables and their values), why it cannot be right, and what to type instead.
    """


def seen(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """`NAME='value'` for each name, or `NAME is not set`, joined for an error message."""
    return ", ".join(f"{name}={environ[name]!r}" if name in environ else f"{name} is not set" for name in names)
