"""What a job reads and writes: azure-ai-ml's inputs and outputs, and the keys of the recipe that get their paths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from azureml_strategy.jobs.assets import short_reference
from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.settings import InputSettings, JobSettings, OutputSettings

if TYPE_CHECKING:
    from azure.ai.ml import Input, Output

_INPUT_TYPES = ("uri_folder", "uri_file", "mltable")
_INPUT_MODES = {"ro_mount": _INPUT_TYPES, "download": _INPUT_TYPES, "eval_mount": ("mltable",)}
_OUTPUT_TYPES = ("uri_folder", "uri_file")
_OUTPUT_MODES = ("rw_mount", "upload")
# Azure ML makes environment variables of the names.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def job_inputs(inputs: Mapping[str, InputSettings]) -> dict[str, Input]:
    """The inputs as azure-ai-ml has them.

    Raises:
        JobError: one without a path, or a name, type or mode that there is none of.
    """
    from azure.ai.ml import Input

    found = {}
    for name, each in inputs.items():
        place = f"job.inputs.{name}"
        _check_name(place, name)
        _check_choice(f"{place}.type", each.type, _INPUT_TYPES)
        _check_choice(f"{place}.mode", each.mode, [mode for mode, types in _INPUT_MODES.items() if each.type in types])
        if not each.path:
            raise JobError(
                f"{place} has no path. Name a data asset, {place}.path=azureml:NAME@latest, a folder in a datastore, "
                f"{place}.path=azureml://datastores/NAME/paths/FOLDER, or leave the input out: '~{place}'."
            )
        found[name] = Input(type=each.type, path=short_reference(each.path), mode=each.mode)
    return found


def job_outputs(outputs: Mapping[str, OutputSettings]) -> dict[str, Output]:
    """The outputs as azure-ai-ml has them.

    Raises:
        JobError: a name, type or mode that there is none of.
    """
    from azure.ai.ml import Output

    for name, each in outputs.items():
        place = f"job.outputs.{name}"
        _check_name(place, name)
        _check_choice(f"{place}.type", each.type, _OUTPUT_TYPES)
        _check_choice(f"{place}.mode", each.mode, _OUTPUT_MODES)
    return {name: Output(type=each.type, path=each.path, mode=each.mode) for name, each in outputs.items()}


def access_patterns(inputs: Mapping[str, InputSettings]) -> list[str]:
    """How each mounted input is read."""
    return [each.access for each in inputs.values() if each.mode != "download"]


def path_overrides(job: JobSettings, overrides: Sequence[str]) -> list[str]:
    """The overrides that hand the paths over, in Azure ML's notation: `data.root=${{inputs.images}}`.

    They are no shell words yet: the service writes a path, or a variable that holds it, in their place, so that no
    quotation marks may stand around them.

    Args:
        job: whose inputs and outputs say which key they set.
        overrides: the user's own.

    Raises:
        JobError: two of them set the same key, or the user sets it too.
    """
    places = [(f"job.inputs.{name}", f"inputs.{name}", each.sets) for name, each in job.inputs.items()]
    places += [(f"job.outputs.{name}", f"outputs.{name}", each.sets) for name, each in job.outputs.items()]
    setters = {override.partition("=")[0].lstrip("+"): f"the override {override!r}" for override in overrides}
    found = []
    for place, reference, key in places:
        if key is None:
            continue
        if key in setters:
            raise JobError(
                f"{place} sets {key} to its path in the job, and {setters[key]} sets it too. Leave the latter out, or "
                f"say that nothing gets this path: {place}.sets=null."
            )
        setters[key] = place
        found.append(f"{key}=${{{{{reference}}}}}")
    return found


def _check_name(place: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise JobError(f"{place} has a name that Azure ML refuses. Use letters, digits and _, a letter first.")


def _check_choice(place: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise JobError(f"{place} is {value!r}. Known: {', '.join(known)}.")
