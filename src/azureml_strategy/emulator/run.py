"""The MLflow run that an emulated job belongs to, as every Azure ML job belongs to one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from azureml_strategy.cluster.emulated import EmulatedRun
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.emulator.errors import EmulationError

if TYPE_CHECKING:
    from mlflow import MlflowClient

_EXPERIMENT = "emulated"


@dataclass(frozen=True)
class _OpenRun(EmulatedRun):
    """A run that the emulator has opened and closes, as Azure ML does."""

    client: MlflowClient

    def end(self, status: str) -> None:
        """Close the run with `FINISHED`, `FAILED` or `KILLED`."""
        self.client.set_terminated(self.run_id, status)


@contextmanager
def mlflow_run(isolated: bool) -> Iterator[_OpenRun]:
    """Open a run where MLFLOW_TRACKING_URI says, or in `mlflow.db` in this folder.

    Args:
        isolated: whether the nodes reach files only, not a server.

    Raises:
        EmulationError: the nodes could not reach the store.
    """
    from mlflow import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{os.path.abspath('mlflow.db')}"
    if isolated and "://" in uri and not uri.startswith(("sqlite:", "file:")):
        raise EmulationError(
            f"Isolated nodes cannot reach {redact_text(uri)}. Leave MLFLOW_TRACKING_URI unset, or set it to "
            "sqlite:///mlflow.db, or leave --isolate out."
        )
    client = MlflowClient(uri)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
    run_id = client.create_run(experiment_id).info.run_id
    run = _OpenRun(run_id, name, experiment_id, uri, client)
    try:
        yield run
    except BaseException:
        run.end("FAILED")
        raise
