"""The MLflow run to log into: the job's own, or a new one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from azureml_strategy.cluster.redaction import redact, redact_text
from azureml_strategy.tracking.limits import TAG_VALUE_LENGTH
from azureml_strategy.tracking.names import clean_name

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# MLflow 3 refuses its older default, a folder of files.
DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "lightning_logs"


class TrackingError(RuntimeError):
    """The tracking store cannot be used as it was asked for."""


@dataclass(frozen=True)
class OpenRun:
    """A run that can be written to.

    Attributes:
        client: talks to the store.
        tracking_uri: the store; may hold credentials.
        run: the run as it was when it was opened.
        experiment_name: the experiment that it is in.
        owned: whether it was opened here, and so has to be ended here.
    """

    client: MlflowClient
    tracking_uri: str
    run: Run
    experiment_name: str
    owned: bool

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self.run.info.run_id)


def resolve_tracking_uri(given: str | None) -> str:
    """The given store, else the one that MLFLOW_TRACKING_URI names now, else a local SQLite file.

    Raises:
        TrackingError: an Azure ML store without the package that opens it.
    """
    uri = given or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI
    if uri.startswith("azureml:") and find_spec("azureml") is None:
        raise TrackingError(
            "The tracking store is an azureml:// address, which MLflow opens only with azureml-mlflow, and that is "
            "not installed. Add it to the job's environment: pip install 'azureml-strategy[azure]'."
        )
    return uri


def join_run(tracking_uri: str, run_id: str, tags: Mapping[str, Any] | None = None) -> OpenRun:
    """Open an existing run, in whatever experiment it is, and add tags to it; its name stays.

    Raises:
        TrackingError: the store has no such run.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME

    with _opening(tracking_uri):
        client = MlflowClient(tracking_uri)
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise TrackingError(_unknown_run(tracking_uri, run_id)) from error
        for name, value in _texts(tags).items():
            if name != MLFLOW_RUN_NAME:
                client.set_tag(run_id, name, value)
        return OpenRun(client, tracking_uri, run, client.get_experiment(run.info.experiment_id).name, owned=False)


@contextmanager
def _opening(tracking_uri: str) -> Iterator[None]:
    """Errors of the store, which MLflow words with its whole address, come without the password in it."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        said = redact_text(str(error))
        if said == str(error):
            raise
        raise TrackingError(f"The tracking store {redact_text(tracking_uri)} cannot be used: {said}") from None


def _unknown_run(tracking_uri: str, run_id: str) -> str:
    if os.environ.get("MLFLOW_RUN_ID") == run_id:
        source, fix = "MLFLOW_RUN_ID", "unset MLFLOW_RUN_ID to open a new run"
    else:
        source, fix = "run_id", "leave run_id out to open a new run"
    return (
        f"{source}={run_id} names a run that the store {redact_text(tracking_uri)} does not have, so there is nothing "
        f"to log into. Set MLFLOW_TRACKING_URI (or tracking_uri=) to the store that has it, or {fix}."
    )


def start_run(
    tracking_uri: str,
    experiment_name: str | None,
    run_name: str | None = None,
    tags: Mapping[str, Any] | None = None,
    artifact_location: str | None = None,
) -> OpenRun:
    """Open a new run.

    The experiment is the named one, else that of MLFLOW_EXPERIMENT_ID or MLFLOW_EXPERIMENT_NAME, else
    `lightning_logs`; it is made where it does not exist.
    """
    from mlflow.tracking import MlflowClient
    from mlflow.tracking.context.registry import resolve_tags

    with _opening(tracking_uri):
        client = MlflowClient(tracking_uri)
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID") if experiment_name is None else None
        if experiment_id is None:
            name = experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT
            experiment = client.get_experiment_by_name(name)
            experiment_id = (
                client.create_experiment(name, artifact_location) if experiment is None else experiment.experiment_id
            )
        # MLflow's own tags are among them, such as the address of the git repository, which may hold a token.
        run = client.create_run(experiment_id, tags=_texts(resolve_tags(_texts(tags))), run_name=run_name)
        return OpenRun(client, tracking_uri, run, client.get_experiment(experiment_id).name, owned=True)


def end_run(run: OpenRun, status: str) -> None:
    """Mark a run as ended; a store that is away by now costs a warning, not the training that is done."""
    from mlflow.exceptions import MlflowException

    try:
        run.client.set_terminated(run.run_id, status)
    except MlflowException as error:
        warnings.warn(f"Run {run.run_id} could not be marked {status}: {redact_text(str(error))}", stacklevel=3)


def _texts(tags: Mapping[str, Any] | None) -> dict[str, str]:
    return {clean_name(name): str(redact(name, str(value)))[:TAG_VALUE_LENGTH] for name, value in (tags or {}).items()}
