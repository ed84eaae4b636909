"""Finds or opens the MLflow run of this job, says where it is, and lets a script's `mlflow.start_run()` join it."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import shlex
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from azureml_strategy.cluster.environ import initial_environ
from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.redaction import redact, redact_text
from azureml_strategy.lazy import install_line
from azureml_strategy.tracking.batch import TAG_VALUE_LENGTH, clean_name
from azureml_strategy.tracking.source import script_run_name, with_source_tags
from azureml_strategy.tracking.store import TrackingError as TrackingError
from azureml_strategy.tracking.store import one_attempt_client

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)


# azureml://REGION.api.azureml.ms/mlflow/v1.0/subscriptions/S/resourceGroups/G/providers/.../workspaces/W
_WORKSPACE = re.compile(r"/resourcegroups/(?P<group>[^/?]+)/.*/workspaces/(?P<workspace>[^/?]+)", re.IGNORECASE)

# MLflow 3 refuses its older default, a folder of files.
DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "lightning_logs"
# Where `mlflow ui` serves by default.
_LOCAL_SERVER = "http://127.0.0.1:5000"
RUN_NAME_TAG = "mlflow.runName"  # mlflow.utils.mlflow_tags.MLFLOW_RUN_NAME
# This tag finds the run if the answer to its creation was lost.
_START_ID = "azureml_strategy.start_id"


@dataclass(frozen=True)
class RunLocation:
    """A description of a run that is safe to print: it holds no credentials.

    Attributes:
        store: the tracking store.
        experiment: the experiment's name.
        run_id: the run's id.
        run_name: the run's name.
        open_with: a command or an address that shows the run.
        address: the address of the run's page; for a store on this machine, once the command serves it. None if the
            command opens it.
    """

    store: str
    experiment: str
    run_id: str
    run_name: str
    open_with: str
    address: str | None = None

    def how_to_open(self) -> list[str]:
        """Lines for the console."""
        lines = [f"Open the run: {self.open_with}"]
        return lines if self.address in (None, self.open_with) else [*lines, f"Then its page is {self.address}"]


def locate(tracking_uri: str, experiment: str, experiment_id: str, run_id: str, run_name: str) -> RunLocation:
    """Describe where a run is and how to open it."""
    store = describe_store(tracking_uri)
    if store.startswith("azureml:"):
        # Not the address of the studio's page, which holds the subscription's id.
        found = _WORKSPACE.search(store)
        where = f" --resource-group {found['group']} --workspace-name {found['workspace']}" if found else ""
        return RunLocation(store, experiment, run_id, run_name, f"az ml job show --name {run_id}{where} --web")
    is_server = store.startswith(("http://", "https://"))
    # The routes of MLflow's pages lie behind `#`, in versions 2 and 3.
    page = f"{store.rstrip('/') if is_server else _LOCAL_SERVER}/#/experiments/{experiment_id}/runs/{run_id}"
    open_with = page if is_server else f"mlflow ui --backend-store-uri {shlex.quote(store)}"
    return RunLocation(store, experiment, run_id, run_name, open_with, page)


def describe_store(tracking_uri: str) -> str:
    """The address of a store without secrets, with the absolute path of a SQLite file."""
    prefix, path = "sqlite:///", tracking_uri.removeprefix("sqlite:///")
    return redact_text(f"{prefix}{Path(path).absolute()}" if tracking_uri.startswith(prefix) else tracking_uri)


class LoggedMetrics:
    """The metrics that previous attempts logged: each up to the last step that the store has.

    An attempt may end at any moment, but it writes the points of each metric in order, so the store has all of them up
    to some step. The history of each metric is read once, on the thread of the writer, before this attempt writes it.
    """

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._last: dict[str, float] = {}

    def __contains__(self, metric: Metric) -> bool:
        if metric.key not in self._last:
            history = self._client.get_metric_history(self._run_id, metric.key)
            self._last[metric.key] = max((each.step for each in history), default=-math.inf)
        return bool(metric.step <= self._last[metric.key])


@dataclass(frozen=True)
class OpenRun:
    """A run that can be written to, as it was when it was opened. The address of its store may hold credentials."""

    client: MlflowClient
    tracking_uri: str = field(repr=False)
    run: Run
    experiment_name: str

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self.run.info.run_id)


@dataclass(frozen=True)
class RunRequest:
    """The run that the user asked for. It can be opened as soon as its store answers.

    Attributes:
        tracking_uri: the store; may hold credentials.
        run_id: the run to join; None for a new one.
        experiment_id: of a new run, if known; else the experiment of this name, which is created if it does not exist.
        artifact_location: where an experiment that is created here keeps its files.
        started_ms: time of the request, in ms since 1970. Its `start_id` is unique.
    """

    tracking_uri: str = field(repr=False)
    run_id: str | None = None
    experiment_id: str | None = None
    experiment_name: str = DEFAULT_EXPERIMENT
    run_name: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    artifact_location: str | None = None
    started_ms: int = field(default_factory=lambda: int(1000 * time.time()))
    start_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def open(self, again: bool = False) -> OpenRun:
        """Join the run, or open a new one.

        Args:
            again: whether a previous call may have opened the run although its answer was lost.

        Raises:
            TrackingError: the store has no such run.
            Exception: whatever MLflow raises if the store does not answer.
        """
        client = one_attempt_client(self.tracking_uri)
        if self.run_id is not None:
            return join_run(self.tracking_uri, self.run_id, self.tags, client)
        experiment_id = self.experiment_id or self._find_or_create_experiment(client)
        by_this_request = f"tags.`{_START_ID}` = '{self.start_id}'"
        found = client.search_runs([experiment_id], by_this_request, max_results=1) if again else []
        if found:
            run = found[0]
        else:
            tags = {**self.tags, _START_ID: self.start_id}
            run = client.create_run(experiment_id, start_time=self.started_ms, tags=tags, run_name=self.run_name)
        return OpenRun(client, self.tracking_uri, run, client.get_experiment(experiment_id).name)

    def _find_or_create_experiment(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return str(found.experiment_id)
        return client.create_experiment(self.experiment_name, self.artifact_location)


def request_run(
    tracking_uri: str,
    run_id: str | None = None,
    experiment_name: str | None = None,
    run_name: str | None = None,
    tags: Mapping[str, Any] | None = None,
    artifact_location: str | None = None,
    suggested_name: str | None = None,
) -> RunRequest:
    """Make a request from the arguments and the current environment, without opening the run.

    Without `run_id` it is a new run. Its name is `run_name`, else the one in the tags, else `suggested_name`, else that
    of the script's file. Its experiment is the named one, else that of MLFLOW_EXPERIMENT_ID or
    MLFLOW_EXPERIMENT_NAME, else `lightning_logs`.
    """
    given = _texts(tags)
    if run_id is not None:
        return RunRequest(tracking_uri, run_id, tags=given)
    return RunRequest(
        tracking_uri,
        experiment_id=os.environ.get("MLFLOW_EXPERIMENT_ID") if experiment_name is None else None,
        experiment_name=experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT,
        # Without a name, MLflow draws one with Python's random numbers. After `seed_everything` it would be the same
        # one each time. And since the writer's thread draws it, the training's random numbers would differ from run to
        # run.
        run_name=run_name or given.get(RUN_NAME_TAG) or suggested_name or script_run_name(),
        # The address of the git repository may hold a token.
        tags=_texts(with_source_tags(given)),
        artifact_location=artifact_location,
    )


@dataclass(frozen=True)
class JobRun:
    """The run that Azure ML opened for a job. The address of its store may hold credentials."""

    tracking_uri: str = field(repr=False)
    run_id: str


def job_run() -> JobRun | None:
    """Return the run of this process's job; None outside of one.

    The id and the store are those that the process was started with, because MLflow changes the environment:
    `mlflow.start_run()`, and so `mlflow.autolog()`, removes MLFLOW_RUN_ID, and `mlflow.set_tracking_uri()` sets
    MLFLOW_TRACKING_URI.
    """
    job = read_job()
    initial: Mapping[str, str] = initial_environ()
    environ = initial if job is not None and initial.get("AZUREML_RUN_ID") == job.run_id else os.environ
    tracking_uri = environ.get("MLFLOW_TRACKING_URI")
    return None if job is None or not tracking_uri else JobRun(tracking_uri, environ.get("MLFLOW_RUN_ID") or job.run_id)


def resolve_tracking_uri(given: str | None) -> str:
    """The given store, else the one that MLFLOW_TRACKING_URI names now, else a local SQLite file.

    Raises:
        TrackingError: the store is in Azure ML, and the package that opens it is not installed.
    """
    uri = given or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI
    if uri.startswith("azureml:") and find_spec("azureml") is None:
        raise TrackingError(
            "The tracking store is an azureml:// address, which MLflow opens only with azureml-mlflow, and that is "
            "not installed. In a job, add a line `azureml-mlflow` to the requirements of its environment; here, type "
            f"{install_line('tracking')}."
        )
    return uri


def is_remote(tracking_uri: str) -> bool:
    """Whether the store is a server, which may be away for a while, and not a file or a database."""
    return tracking_uri.startswith(("http:", "https:", "azureml:", "databricks"))


def join_run(
    tracking_uri: str, run_id: str, tags: Mapping[str, Any] | None = None, client: MlflowClient | None = None
) -> OpenRun:
    """Open an existing run of any experiment, and add tags to it. It keeps its name.

    Raises:
        TrackingError: the store has no such run.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    client = client or MlflowClient(tracking_uri)
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise TrackingError(_unknown_run(tracking_uri, run_id)) from None
    for name, value in _texts(tags).items():
        if name != RUN_NAME_TAG:
            client.set_tag(run_id, name, value)
    return OpenRun(client, tracking_uri, run, client.get_experiment(run.info.experiment_id).name)


def _unknown_run(tracking_uri: str, run_id: str) -> str:
    if os.environ.get("MLFLOW_RUN_ID") == run_id:
        source, fix = "MLFLOW_RUN_ID", "unset MLFLOW_RUN_ID to open a new run"
    else:
        source, fix = "run_id", "leave run_id out to open a new run"
    return (
        f"{source}={run_id} names a run that the store {redact_text(tracking_uri)} does not have, so there is nothing "
        f"to log into. Set MLFLOW_TRACKING_URI (or tracking_uri=) to the store that has it, or {fix}."
    )


def _texts(tags: Mapping[str, Any] | None) -> dict[str, str]:
    return {clean_name(name): str(redact(name, str(value)))[:TAG_VALUE_LENGTH] for name, value in (tags or {}).items()}


def join_job_run(fluent: ModuleType) -> None:
    """Replace `start_run` of `mlflow.tracking.fluent`, which fails in a job after a script's `mlflow.set_experiment`.

    MLflow takes the run that MLFLOW_RUN_ID names, and then refuses it because it belongs to another experiment. On a
    laptop, where there is no such run, the same lines work.
    """
    start_run = fluent.start_run

    @functools.wraps(start_run)
    def start_or_join_run(*args: Any, **kwargs: Any) -> Any:
        chosen = fluent._active_experiment_id
        if chosen is None or args or kwargs.get("run_id") or not os.environ.get("MLFLOW_RUN_ID"):
            return start_run(*args, **kwargs)
        fluent._active_experiment_id = None  # type: ignore[attr-defined]
        try:
            run = start_run(*args, **kwargs)
        finally:
            fluent._active_experiment_id = chosen  # type: ignore[attr-defined]
        if run.info.experiment_id != chosen:
            log.warning(
                "mlflow.set_experiment() has chosen experiment %s, and the run of this job belongs to %s: "
                "mlflow.start_run() joins the job's run, and later runs of the script go to its own experiment. "
                "Name the experiment when you submit the job (job.experiment), and leave mlflow.set_experiment() out.",
                chosen,
                run.info.experiment_id,
            )
        return run

    fluent.start_run = start_or_join_run  # type: ignore[attr-defined]
    if getattr(sys.modules.get("mlflow"), "start_run", None) is start_run:  # mlflow was imported before
        sys.modules["mlflow"].start_run = start_or_join_run  # type: ignore[attr-defined]
