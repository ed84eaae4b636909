"""Opens and closes the MLflow run of an emulated job, as Azure ML does for every job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from azureml_strategy.cluster.emulated import EmulatedRun
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.emulator.nodes import EmulationError
from azureml_strategy.tracking.batch import Batch, End
from azureml_strategy.tracking.run import RunRequest
from azureml_strategy.tracking.spool import Spool
from azureml_strategy.tracking.store import StoreAwayError, StoreRefusedError, one_attempt_client, store_errors
from azureml_strategy.tracking.upload import command

if TYPE_CHECKING:
    from mlflow import MlflowClient

_EXPERIMENT = "emulated"


@dataclass(frozen=True)
class _OpenRun(EmulatedRun):
    """A run that the emulator opens and closes, as Azure ML does."""

    client: MlflowClient

    def end(self, status: str) -> None:
        """Close the run as `FINISHED`, `FAILED` or `KILLED`; if the store fails, keep that in a file to send later."""
        end = End(status, int(1000 * time.time()))
        try:
            with store_errors():
                self.client.set_terminated(self.run_id, end.value, end.timestamp_ms)
        except (StoreAwayError, StoreRefusedError) as error:
            print(f"The job's run {self.run_id} could not be marked {status}: {error}")
            self._keep(end)

    def _keep(self, end: End) -> None:
        folder = Path.cwd()
        try:
            spool = Spool.create(folder, RunRequest(self.tracking_uri, self.run_id))
            spool.append([Batch("end", [end])])
            spool.close()
        except OSError as error:
            print(f"Nor could that be kept in {folder}: {error}", flush=True)
        else:
            print(f"That and what the job could not log here is sent with: {command(folder)}", flush=True)


@contextmanager
def mlflow_run(isolated: bool) -> Iterator[_OpenRun]:
    """Open a run in the store of MLFLOW_TRACKING_URI, or in `mlflow.db` in this folder.

    An exception inside the block closes the run as `FAILED`.

    Args:
        isolated: whether the nodes can reach only files, not a server.

    Raises:
        EmulationError: the nodes could not reach the store, or the store does not answer or refuses.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{os.path.abspath('mlflow.db')}"
    if isolated and "://" in uri and not uri.startswith(("sqlite:", "file:")):
        raise EmulationError(
            f"Isolated nodes cannot reach {redact_text(uri)}. Leave MLFLOW_TRACKING_URI unset, or set it to "
            "sqlite:///mlflow.db, or leave --isolate out."
        )
    run = _open(uri, os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT))
    try:
        yield run
    except BaseException:
        run.end("FAILED")
        raise


def _open(uri: str, name: str) -> _OpenRun:
    try:
        with store_errors():
            client = one_attempt_client(uri)
            experiment = client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
            run_id = client.create_run(experiment_id).info.run_id
    except (StoreAwayError, StoreRefusedError) as error:
        raise EmulationError(
            f"No run can be opened in {redact_text(uri)}, which a job needs: {error}. Start that server, or unset "
            "MLFLOW_TRACKING_URI to log into mlflow.db here."
        ) from None
    return _OpenRun(run_id, name, experiment_id, uri, client)
