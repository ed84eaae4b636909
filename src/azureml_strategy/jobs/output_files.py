"""Files of a job's output, each fetched on its own: an output can hold many checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.service_errors import service_errors

if TYPE_CHECKING:
    from azure.ai.ml import MLClient


class OutputFiles:
    """What lies in one output of a job.

    Args:
        client: of the workspace.
        job: name of the job.
        output: name of the output.

    Raises:
        JobError: the job has no such output.
        ServiceError: there is no such job, or storage cannot be read.
    """

    def __init__(self, client: MLClient, job: str, output: str) -> None:
        from azure.ai.ml._artifacts._artifact_utilities import get_datastore_info
        from azure.ai.ml._utils._storage_utils import AzureMLDatastorePathUri, get_storage_client

        with service_errors():
            # Only the data plane knows where an output without a path of its own went.
            uri = client.jobs._get_named_output_uri(job, output).get(output)
            if uri is None:
                raise JobError(f"{job} has no output {output!r}: `azureml-strategy jobs show {job}` lists its outputs.")
            place = AzureMLDatastorePathUri(uri)
            self._root = f"{place.path.rstrip('/')}/"
            storage: Any = get_storage_client(**get_datastore_info(client.datastores, place.datastore))
            self._storage = storage
            self.names: list[str] = [name.removeprefix(self._root) for name in storage.list(self._root)]

    def fetch(self, path: str, folder: Path) -> Path:
        """Copy a file, or a folder with all that is in it.

        Args:
            path: in the output.
            folder: where to put it, under its own name.

        Returns:
            Where it is now.
        """
        target = folder / Path(path).name
        single = path in self.names
        with service_errors():
            self._storage.download(self._root + path + ("" if single else "/"), folder if single else target)
        return target
