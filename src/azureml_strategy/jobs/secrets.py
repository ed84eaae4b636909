"""Refuses a secret before it gets into a job, where everybody with access to the workspace could read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from azureml_strategy.cluster.redaction import is_secret
from azureml_strategy.jobs.errors import JobError

_INSTEAD = (
    "A job's command and variables can be read by everybody with access to the workspace. Put it into the workspace's "
    "key vault and read it in the job, and reach storage through a datastore or the job's own identity "
    "(job.identity.type=managed)."
)


def refuse_secrets(texts: Mapping[str, str]) -> None:
    """Look through everything that a job will carry.

    Args:
        texts: each value by its name: a variable, a key of the recipe, or whatever tells the user where it stands.

    Raises:
        JobError: one of them is a secret by its name, by its form, or because a variable here with such a name holds
            it. The message does not repeat it.
    """
    for name, value in texts.items():
        if is_secret(name, value):
            raise JobError(
                f"{name} looks like a secret, by its name, its form or a variable that holds it, so that no job was "
                f"made. {_INSTEAD}"
            )


def override_texts(overrides: Iterable[str]) -> dict[str, str]:
    """What each override of a command line sets, by its key."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+~"): value for key, _, value in pairs}
