"""The private names of azure-ai-ml that this package uses, where there is no public way.

`INTERNALS` says what each is for. Importing this file does not import azure-ai-ml; the use of a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml._artifacts._artifact_utilities import get_datastore_info
    from azure.ai.ml._utils._asset_utils import IgnoreFile, get_ignore_file, get_upload_files_from_folder
    from azure.ai.ml._utils._storage_utils import AzureMLDatastorePathUri, get_storage_client
    from azure.ai.ml.entities import Command, Job
    from azure.ai.ml.entities._assets._artifacts.code import Code
    from azure.core.pipeline.policies._utils import get_retry_after

__all__ = [
    "AzureMLDatastorePathUri",
    "Code",
    "IgnoreFile",
    "code_id",
    "get_datastore_info",
    "get_ignore_file",
    "get_retry_after",
    "get_storage_client",
    "get_upload_files_from_folder",
    "ignore_rules",
    "output_uri",
    "run_details_of",
    "standalone_job",
]

_IMPORTED = {
    # The folder of code, listed before a job is made, and uploaded by rules of ours.
    "azure.ai.ml._utils._asset_utils": {
        "IgnoreFile": "the base of our rules, which an upload takes",
        "get_ignore_file": "the user's own rules",
        "get_upload_files_from_folder": "the walk of the upload itself, so that a list names what goes up",
    },
    "azure.ai.ml.constants._common": {
        "AzureMLResourceType": "names the kind of an asset to upload",
    },
    "azure.ai.ml.entities._assets._artifacts.code": {
        "Code": "the entity that takes rules; a job with a folder makes one without",
    },
    # Files of a job's outputs, one by one: the public download takes an output as a whole.
    "azure.ai.ml._artifacts._artifact_utilities": {
        "get_datastore_info": "the address and the credential of a datastore",
    },
    "azure.ai.ml._utils._storage_utils": {
        "AzureMLDatastorePathUri": "takes the address of an output apart",
        "get_storage_client": "lists and downloads what is in storage",
    },
    "azure.core.pipeline.policies._utils": {
        "get_retry_after": "how long the service asks to wait, which azure-core obeys in silence",
    },
}
INTERNALS: dict[str, dict[str, str]] = {
    **_IMPORTED,
    "azure.ai.ml._utils._asset_utils.IgnoreFile": {
        "_get_ignore_list": "overridden: our rules come before the user's",
        "_path": "set: the folder that rules are relative to",
    },
    "azure.ai.ml.entities.Command": {
        "_to_job": "as `az ml job create` writes it; the public dump writes a step of a pipeline",
    },
    "azure.ai.ml.operations.JobOperations": {
        "_get_named_output_uri": "where an output without a path of its own is, which only the data plane knows",
        "_orchestrators": "uploads a code entity of ours",
        "_runs_operations": "state, logs and error of a job: the public stream waits for its end and prints",
    },
}

__getattr__ = lazy_attributes(__name__, {name: module for module, names in _IMPORTED.items() for name in names})


def ignore_rules(file: IgnoreFile) -> list[str]:
    """Return the lines of an ignore file."""
    return file._get_ignore_list()


def code_id(client: MLClient, code: Code) -> str:
    """Return the id of code in the workspace, after an upload unless the workspace has the same files."""
    from azure.ai.ml.constants._common import AzureMLResourceType

    return str(client.jobs._orchestrators.get_asset_arm_id(code, azureml_type=AzureMLResourceType.CODE))


def output_uri(client: MLClient, job: str, output: str) -> str | None:
    """Return the address of a job's output; None if the job has no such output."""
    return client.jobs._get_named_output_uri(job, output).get(output)


def run_details_of(client: MLClient, job: str) -> Any:
    """Return a job in the run history, an `azure.ai.ml._restclient.runhistory.models.RunDetails`."""
    return client.jobs._runs_operations.get_run_details(job)


def standalone_job(job: Command) -> Job:
    """Return the job as one of its own, not as a step of a pipeline."""
    return job._to_job()
