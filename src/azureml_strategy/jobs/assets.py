"""References to what lies in a workspace: how azure-ai-ml wants them, and whether what they name is there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.service_errors import ServiceError, service_errors
from azureml_strategy.jobs.settings import InputSettings

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

_ASSET = re.compile(r"azureml:(?P<name>[^/:@]+)(?::(?P<version>[^/:@]+)|@(?P<label>[^/:@]+))")


def short_reference(reference: str) -> str:
    """A reference as azure-ai-ml's classes want it, which is as its own reader of YAML makes it.

    They look for the label of `azureml:NAME@latest` under the name `azureml:NAME`, and find nothing.
    """
    return re.sub(r"^azureml:(?!//)", "", reference)


def check_data(inputs: Mapping[str, InputSettings], client: MLClient) -> None:
    """Ask the workspace for each data asset by name: azure-ai-ml would only say that something is not there.

    Raises:
        JobError: one of them is not there.
        ServiceError: Azure did not say.
    """
    from azure.ai.ml.exceptions import MlException

    for name, each in inputs.items():
        asset = _ASSET.fullmatch(each.path or "")
        if asset is None:
            continue
        try:
            with service_errors():
                client.data.get(asset["name"], version=asset["version"], label=asset["label"])
        except ServiceError as error:
            if error.status != 404 and not isinstance(error.__cause__, MlException):  # of a label
                raise
            raise JobError(
                f"job.inputs.{name}.path is {each.path}, but workspace {client.workspace_name} has no such data asset. "
                f"Name one that it has (`azureml-strategy data show {asset['name']}` lists what there is of it), or a "
                f"folder in a datastore: job.inputs.{name}.path=azureml://datastores/NAME/paths/FOLDER."
            ) from error
