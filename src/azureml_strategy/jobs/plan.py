"""What a job runs and with which settings: the common form of a recipe, a script and a command, without secrets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from azureml_strategy.cluster.redaction import is_secret, redact_text
from azureml_strategy.command_line import is_override
from azureml_strategy.jobs.hyperparameters import Sweep
from azureml_strategy.jobs.resources import node_size, refuse_retired
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.settings import ClusterSettings, JobSettings
from azureml_strategy.jobs.snapshot import Snapshot, list_snapshot
from azureml_strategy.network.vm_sizes import VMSize
from azureml_strategy.tracking.expected import ExpectedRate

_INSTEAD = (
    "A job's command and variables can be read by everybody with access to the workspace. Put it into the workspace's "
    "key vault and read it in the job, and reach storage through a datastore or the job's own identity "
    "(job.identity.type=managed)."
)


@dataclass(frozen=True)
class JobPlan:
    """A job before it is rendered.

    Attributes:
        name: what the experiment and the job's own name are made from.
        command: the command line of each process, for a shell.
        code: the folder of code that the job gets; None if it needs none.
        needs: path in the folder of code of a file without which the job would fail.
        tags: further tags, beside `job.tags`.
        variables: further environment variables, beside `job.environment_variables`.
        notes: lines that tell the user what was chosen.
        sweep: the search whose trials run this; None for one job.
        expect: predicts the rate of the job, if the planner can; None where nobody can, as for a script.
        title: what the display name, which MLflow shows as the run's, is made from; by default `name`.
    """

    name: str
    command: str
    cluster: ClusterSettings
    job: JobSettings
    code: str | None = None
    needs: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    sweep: Sweep | None = None
    expect: Callable[[], ExpectedRate | None] | None = None
    title: str | None = None

    @cached_property
    def size(self) -> VMSize | None:
        """The VM size of the nodes; None if only the name of the compute is known.

        Raises:
            JobError: see `node_size`.
        """
        return node_size(self.cluster)

    def snapshot(self) -> Snapshot | None:
        """List the files that the job gets; None if it needs no code.

        Raises:
            JobError: the folder is missing, empty or unreadable, or the rules leave out the file that the job needs.
        """
        if self.code is None:
            return None
        snapshot = list_snapshot(self.code)
        if self.needs is not None and self.needs.removeprefix("./") not in snapshot.files:
            raise JobError(
                f"{self.needs} is left out by {self.code}/.amlignore or .gitignore, or lies where no code is, and the "
                "job needs it."
            )
        return snapshot


def check_code(folder: str) -> str:
    """Return `job.code` if it is a folder.

    Raises:
        JobError: it is none.
    """
    if not os.path.isdir(folder):
        raise JobError(f"job.code is {folder}, but there is no such folder.")
    return folder


def check_words(words: Iterable[str]) -> None:
    """Check the overrides of one job.

    Raises:
        JobError: a word is no override, is not in Hydra's notation, stands for several runs, or holds a secret.
    """
    for word in words:
        if not is_override(word):
            raise JobError(
                f"{word!r} is no override. A job takes KEY=VALUE alone; Hydra's own flags belong to "
                "`azureml-strategy train`, a folder of groups into hydra.searchpath=[...], and the arguments of a "
                "script stand after `--`."
            )
        try:
            parsed = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise JobError(redact_text(f"The override {word!r} is not in Hydra's notation: {error}")) from error
        if parsed.is_sweep_override():
            raise JobError(
                f"{word!r} stands for several runs, and a job is one. Sweep by --sweep 'KEY=choice(...)' or by "
                f"`azureml-strategy train RECIPE -m {word} hydra/launcher=azureml`, or put a value with commas in "
                "quotation marks: \"'...'\"."
            )
        if word.startswith("cluster="):
            refuse_retired(word.removeprefix("cluster="))
    refuse_secrets(override_texts(words))


def override_texts(overrides: Iterable[str]) -> dict[str, str]:
    """The value of each override of a command line, by its key."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+~"): value for key, _, value in pairs}


def refuse_secrets(texts: Mapping[str, str]) -> None:
    """Refuse texts that contain a secret, before a job carries them. Each has a name by which the user can find it.

    Raises:
        JobError: a value is secret by its name, by its form, or because a variable of this process with a secret name
            holds it. The message does not repeat the value.
    """
    for name, value in texts.items():
        if is_secret(name, value):
            raise JobError(
                f"{name} looks like a secret, by its name, its form or a variable that holds it, so that no job was "
                f"made. {_INSTEAD}"
            )


def refuse_secret_settings(job: JobSettings) -> None:
    """Refuse secrets in the settings that Azure ML shows to everybody with access to the workspace.

    Raises:
        JobError: one of them is a secret.
    """
    texts = {f"job.environment_variables.{name}": value for name, value in job.environment_variables.items()}
    texts |= {f"job.tags.{name}": value for name, value in job.tags.items()}
    texts |= {f"job.inputs.{name}.path": each.path or "" for name, each in job.inputs.items()}
    texts |= {f"job.inputs.{name}": f"{each.value}" for name, each in job.inputs.items() if each.value is not None}
    texts |= {f"job.outputs.{name}.path": each.path or "" for name, each in job.outputs.items()}
    alone = ("experiment", "display_name", "description", "docker_args")
    refuse_secrets(texts | {f"job.{name}": getattr(job, name) or "" for name in alone})
