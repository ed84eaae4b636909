"""Prepares the inputs and outputs of a job: data assets, mount settings and paths, and reads the files of outputs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_strategy.jobs.azure_internals import output_uri
from azureml_strategy.jobs.service_errors import JobError, ServiceError, service_errors
from azureml_strategy.jobs.settings import InputSettings, JobSettings, OutputSettings, check_choice
from azureml_strategy.network.vm_sizes import VMSize

if TYPE_CHECKING:
    from azure.ai.ml import Input, MLClient, Output

_ASSET = re.compile(r"azureml:(?P<name>[^/:@]+)(?::(?P<version>[^/:@]+)|@(?P<label>[^/:@]+))")

# One pass reads no data twice, so that caching it on disk or in memory is lost work.
_ONCE = {
    "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "true",
    "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "false",
    "DATASET_MOUNT_MEMORY_CACHE_SIZE": "0",
}
_PATTERNS = {
    "epochs": {"DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "true"},
    "once": _ONCE,
    "once_large": {**_ONCE, "DATASET_MOUNT_READ_BUFFER_BLOCK_COUNT": "80"},
    # Cache whole files: blocks that are read ahead of a random place are lost work.
    "random": {"DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "false"},
}
ACCESS_PATTERNS = tuple(_PATTERNS)
# The cache leaves this much of the local disk free for the image and the job's own files: a full disk ends the job.
# Our choice: images with CUDA take 20 GiB and more.
_FREE_GIB = 32
_FREE_FRACTION = 0.1
_MODEL_TYPES = ("custom_model", "mlflow_model", "triton_model")
_INPUT_TYPES = ("uri_folder", "uri_file", "mltable", *_MODEL_TYPES)
_INPUT_MODES = {"ro_mount": _INPUT_TYPES, "download": _INPUT_TYPES, "direct": _INPUT_TYPES, "eval_mount": ("mltable",)}
_OUTPUT_TYPES = ("uri_folder", "uri_file", *_MODEL_TYPES)
_OUTPUT_MODES = ("rw_mount", "upload")
# Azure ML turns the names into environment variables.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def short_reference(reference: str) -> str:
    """Remove the prefix `azureml:` from a reference, as azure-ai-ml's own YAML reader does for its classes.

    With the prefix, the classes look for the label of `azureml:NAME@latest` under the name `azureml:NAME`, in vain.
    """
    return re.sub(r"^azureml:(?!//)", "", reference)


def asset_of(given: InputSettings) -> re.Match[str] | None:
    """The `name`, `version` and `label` of the data asset that an input is; None if it is none."""
    return _ASSET.fullmatch(given.path or "")


def datastore_of(given: InputSettings) -> str | None:
    """The datastore of the workspace in which an input lies; None if it names none."""
    found = re.match(r"azureml://datastores/([^/]+)/", given.path or "")
    return found[1] if found else None


def check_data(inputs: Mapping[str, InputSettings], client: MLClient) -> None:
    """Check that the workspace has each data asset, to name the missing one: azure-ai-ml's own error does not.

    Raises:
        JobError: the workspace lacks a data asset.
        ServiceError: Azure did not answer.
    """
    from azure.ai.ml.exceptions import MlException

    for name, each in inputs.items():
        asset = asset_of(each)
        if asset is None:
            continue
        try:
            with service_errors():
                client.data.get(asset["name"], version=asset["version"], label=asset["label"])
        except ServiceError as error:
            # A missing label raises MlException.
            if error.status != 404 and not isinstance(error.__cause__, MlException):
                raise
            raise JobError(
                f"job.inputs.{name}.path is {each.path}, but workspace {client.workspace_name} has no such data asset. "
                f"Name one that it has (`azureml-strategy data show {asset['name']}` lists what there is of it), or a "
                f"folder in a datastore: job.inputs.{name}.path=azureml://datastores/NAME/paths/FOLDER."
            ) from error


def data_runtime_variables(patterns: Collection[str], size: VMSize | None) -> dict[str, str]:
    """Environment variables that tune the data runtime of a job, by the access pattern of each mounted input.

    Without a mounted input there are none.

    Raises:
        JobError: a pattern is unknown, or the patterns differ: the variables apply to the whole job.
    """
    for pattern in patterns:
        if pattern not in _PATTERNS:
            raise JobError(f"There is no access pattern {pattern!r}. Known: {', '.join(ACCESS_PATTERNS)}.")
    different = sorted(set(patterns))
    if not different:
        return {}
    if len(different) > 1:
        raise JobError(
            f"The mounted inputs are read in different ways ({', '.join(different)}), but the data runtime's variables "
            "hold for the whole job. Give them the same `access`, or let the smaller one be copied: mode: download."
        )
    pattern = different[0]
    variables = dict(_PATTERNS[pattern])
    if pattern in ("epochs", "random") and size is not None and size.local_disk_gib is not None:
        # Cache as much as the local disk can spare; the runtime's own default leaves only 150 MB free.
        spared = int(size.local_disk_gib - max(_FREE_GIB, _FREE_FRACTION * size.local_disk_gib))
        variables["DATASET_MOUNT_CACHE_SIZE"] = str(spared * 2**30)  # bytes
    return variables


class OutputFiles:
    """The files in one output of a job.

    Attributes:
        names: path of each file in the output.

    Raises:
        JobError: the job has no such output.
        ServiceError: there is no such job, or storage cannot be read.
    """

    def __init__(self, client: MLClient, job: str, output: str) -> None:
        from azureml_strategy.jobs.azure_internals import (
            AzureMLDatastorePathUri,
            get_datastore_info,
            get_storage_client,
        )

        with service_errors():
            uri = output_uri(client, job, output)
            if uri is None:
                raise JobError(f"{job} has no output {output!r}: `azureml-strategy jobs show {job}` lists its outputs.")
            place = AzureMLDatastorePathUri(uri)
            self._root = f"{place.path.rstrip('/')}/"
            storage: Any = get_storage_client(**get_datastore_info(client.datastores, place.datastore))
            self._storage = storage
            self.names: list[str] = [name.removeprefix(self._root) for name in storage.list(self._root)]

    def fetch(self, path: str, folder: Path) -> Path:
        """Download a file, or a folder with its content, from its path in the output to a local folder.

        Returns:
            The local path, which ends in the same name.
        """
        target = folder / Path(path).name
        single = path in self.names
        with service_errors():
            self._storage.download(self._root + path + ("" if single else "/"), folder if single else target)
        return target


def job_inputs(inputs: Mapping[str, InputSettings]) -> dict[str, Input | float | str]:
    """Convert the inputs to azure-ai-ml's class; those that are values stay as they are.

    Raises:
        JobError: an input has no path, has both path and value, or its name, type or mode is invalid.
    """
    from azure.ai.ml import Input

    found: dict[str, Input | float | str] = {}
    for name, each in inputs.items():
        place = f"job.inputs.{name}"
        _check_name(place, name)
        if each.value is not None:
            if each.path is not None:
                raise JobError(f"{place} has a path and a value. Keep one.")
            if not isinstance(each.value, (bool, int, float, str)):
                raise JobError(f"{place}.value is {each.value!r}. Azure ML takes a number, a text or a truth value.")
            found[name] = each.value
            continue
        check_choice(f"{place}.type", each.type, _INPUT_TYPES)
        check_choice(f"{place}.mode", each.mode, [mode for mode, types in _INPUT_MODES.items() if each.type in types])
        if not each.path:
            raise JobError(
                f"{place} has no path. Name a data asset, {place}.path=azureml:NAME@latest, a folder in a datastore, "
                f"{place}.path=azureml://datastores/NAME/paths/FOLDER, or leave the input out: '~{place}'."
            )
        found[name] = Input(type=each.type, path=short_reference(each.path), mode=each.mode)
    return found


def job_outputs(outputs: Mapping[str, OutputSettings]) -> dict[str, Output]:
    """Convert the outputs to azure-ai-ml's class.

    Raises:
        JobError: the name, type or mode of an output is invalid.
    """
    from azure.ai.ml import Output

    for name, each in outputs.items():
        place = f"job.outputs.{name}"
        _check_name(place, name)
        check_choice(f"{place}.type", each.type, _OUTPUT_TYPES)
        check_choice(f"{place}.mode", each.mode, _OUTPUT_MODES)
    return {name: Output(type=each.type, path=each.path, mode=each.mode) for name, each in outputs.items()}


def access_patterns(inputs: Mapping[str, InputSettings]) -> list[str]:
    """The access pattern of each mounted input."""
    return [each.access for each in inputs.values() if each.mode != "download" and each.value is None]


def path_overrides(job: JobSettings, overrides: Sequence[str]) -> list[str]:
    """The overrides that give the recipe its paths, in Azure ML's notation: `data.root=${{inputs.images}}`.

    Do not quote them for the shell: the service replaces each placeholder with a path, or a variable that holds it.

    Raises:
        JobError: two paths set the same key, or the user sets it too.
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
