"""Lightning's MLflow logger, for a run that may belong to a job."""

from __future__ import annotations

import os
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger, MLFlowLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.tracking.batch import (
    NOTE_LENGTH,
    NOTE_TAG,
    TAG_VALUE_LENGTH,
    DiskFile,
    End,
    Metrics,
    Params,
    Tags,
    TextFile,
    clean_name,
    merge_description,
)
from azureml_strategy.tracking.events import Event, EventLog
from azureml_strategy.tracking.run import (
    OpenRun,
    RunLocation,
    RunRequest,
    describe_store,
    is_remote,
    locate,
    request_run,
    resolve_tracking_uri,
)
from azureml_strategy.tracking.sender import send_file
from azureml_strategy.tracking.store import StoreAwayError, StoreRefusedError, one_attempt_client, store_errors
from azureml_strategy.tracking.values import (
    as_number,
    as_step,
    as_texts,
    copy_to_host,
    fit_azure,
    new_params,
    type_name,
)
from azureml_strategy.tracking.writer import BatchWriter, TerminationFlush

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from mlflow.tracking import MlflowClient

# How long the start of training waits for a server that does not answer. After that, the run is opened later.
_OPENING_S = 10.0
# Azure ML uploads this folder of a job while the job runs, so its files outlive the node.
_JOB_FOLDER = "logs"
_RUN_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}


class _Session:
    """A run that is open or will be opened, with its writer. Rank 0 creates it when the logger is first used.

    Raises:
        TrackingError: the store does not have the run, or is a file or database that cannot be opened.
    """

    def __init__(self, request: RunRequest, folder: Path, flush_interval_s: float) -> None:
        self.request = request
        self.writer = BatchWriter(request, folder, flush_interval_s)
        self.termination = TerminationFlush(self.writer)
        self.writer.start()
        self.writer.wait_for_run(_OPENING_S if is_remote(request.tracking_uri) else None)
        run = self.writer.run
        self.params = {} if run is None else dict(run.run.data.params)

    @property
    def run(self) -> OpenRun | None:
        """The run; None until its store has answered."""
        return self.writer.run

    @cached_property
    def client(self) -> MlflowClient:
        """A client for the user, with MLflow's own retries."""
        from mlflow.tracking import MlflowClient

        return MlflowClient(self.request.tracking_uri)


class JobMLFlowLogger(MLFlowLogger):
    """Logs into the job's own MLflow run, in the background and in batches that Azure ML accepts.

    Rank 0 chooses the run when the logger is first used, and only rank 0 writes. The logger never closes or renames a
    run that it joined (`run_id` or MLFLOW_RUN_ID), and such a run stays in its experiment. A run that the logger opened
    ends FINISHED, FAILED, or KILLED after SIGTERM or Ctrl-C.

    `log_metrics` and `log_hyperparams` return at once. A value on the GPU is copied there, and the writer's thread
    reads it later. All pending metrics are written by `finalize`, which Lightning calls at the end and on an exception,
    on SIGTERM, and when the interpreter exits. Training continues if the server is down, at the start or later, or
    refuses a value. What the server does not take goes to a file in `folder`, which is sent when the server is back, by
    the next start, or by `azureml-strategy jobs upload-metrics`.

    Args:
        experiment_name: experiment of a run opened here; else MLFLOW_EXPERIMENT_ID or _NAME, else `lightning_logs`.
        run_name: name of a run opened here; by default that of the script's file, or the recipe with its overrides.
        tracking_uri: the store; else MLFLOW_TRACKING_URI, else `sqlite:///mlflow.db`.
        tags: of the run, whether opened or joined.
        log_model: as in Lightning: True uploads checkpoints at the end, "all" as they are saved.
        prefix: put before metric names, with a dash.
        artifact_location: where an experiment that is created here keeps its files.
        run_id: the run to join; else MLFLOW_RUN_ID, else a new one is opened.
        flush_interval_s: seconds for which the writer collects metrics before it sends them.
        folder: for the file of what the store has not taken; by default `logs` in an Azure ML job, else the working
            folder.

    Raises:
        TrackingError: (on first use) the store does not have the run to join, or is no server and cannot be opened.
    """

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        log_model: Literal[True, False, "all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        flush_interval_s: float = 1.0,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        # Not MLFlowLogger's constructor, which would open the store now, on every rank and before the environment is
        # complete. Its upload of checkpoints reads these attributes.
        Logger.__init__(self)
        self._run_id = run_id
        self._prefix = prefix
        self._log_model = log_model
        self._logged_model_time: dict[str, float] = {}
        self._checkpoint_callback = None
        self.tags: dict[str, Any] = tags or {}
        # For what is None, the environment decides when the run is opened.
        self._given_uri, self._given_experiment = tracking_uri, experiment_name
        self._given_name, self._given_location = run_name, artifact_location
        self._flush_interval_s = flush_interval_s
        self._folder = folder
        self._session: _Session | None = None
        self._suggested_name: str | None = None
        self._last_epoch: tuple[int, float] | None = None
        self._warned: set[str] = set()
        self._events = EventLog()

    @property
    @rank_zero_experiment
    def experiment(self) -> MlflowClient:
        """MLflow's client. The first access opens the run. Other ranks get a dummy."""
        return self._open().client

    @property
    @override
    def run_id(self) -> str | None:
        """The run's id; None until its store has answered. Ranks other than 0 know only the id of a joined run."""
        known = self._run_id or os.environ.get("MLFLOW_RUN_ID")
        if not _is_rank_zero():
            return known
        run = self._open().run
        return known if run is None else run.run_id

    @property
    @override
    def version(self) -> str | None:
        """The run's id, or a unique name until the id is known. Lightning names folders by it."""
        return self.run_id or (self._open().request.start_id if _is_rank_zero() else None)

    @property
    @override
    def experiment_id(self) -> str | None:
        """The experiment's id; None on ranks other than 0, and until the store has answered."""
        run = self._open().run if _is_rank_zero() else None
        return None if run is None else str(run.run.info.experiment_id)

    @property
    @override
    def save_dir(self) -> str | None:
        """None: checkpoints go below the Trainer's `default_root_dir`."""
        return None

    @property
    def location(self) -> RunLocation | None:
        """Where the run is and how to open it; None until the store has answered. Call it only on rank 0."""
        run = self._open().run
        if run is None:
            return None
        info = run.run.info
        return locate(run.tracking_uri, run.experiment_name, info.experiment_id, info.run_id, info.run_name)

    def suggest(self, run_name: str, tags: Mapping[str, str]) -> None:
        """Name the run if it is opened here and the user gave no name, and tag it. Call it before the first use.

        Args:
            run_name: the name.
            tags: those of the user win.
        """
        self._suggested_name = run_name
        self.tags = {**tags, **(self.tags or {})}

    @property
    def tracking_uri(self) -> str:
        """The store's address, which may hold credentials. Call it only on rank 0."""
        return self._open().request.tracking_uri

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Queue one point of each metric. A value that is not one real number is left out with a warning.

        Args:
            metrics: values by name: anything that holds one number, of Python, NumPy or torch, on any device.
            step: an integer; None is 0.
        """
        session = self._open()
        session.termination.install()
        prefix = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        values = self._accept({f"{prefix}{name}": value for name, value in metrics.items()})
        at = self._step(step, values)
        if step is not None:
            self._drop_repeated_epoch(values, clean_name(f"{prefix}epoch"), at)
        session.writer.put(Metrics(values, at, int(time.time() * 1000)))

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        session = self._open()
        new = new_params(session.params, as_texts(params))
        if session.request.tracking_uri.startswith("azureml:"):
            new = fit_azure(session.params, new)
        session.params.update(new)
        session.writer.put(Params(new))

    @rank_zero_only
    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Tag the run, in the background."""
        self._open().writer.put(Tags({clean_name(name): str(value) for name, value in tags.items()}))

    @rank_zero_only
    def log_text(self, text: str, path: str) -> None:
        """Put a text file among the run's artifacts.

        Args:
            text: its content.
            path: its path below the run's artifacts.
        """
        self._open().writer.put(TextFile(str(path), str(text)))

    @rank_zero_only
    def log_description(self, lines: Sequence[str]) -> None:
        """Put lines of Markdown into the run's description, in place of those of a previous call or attempt.

        What others wrote there stays. If the store is away, so that this cannot be read, nothing is written.

        Args:
            lines: the most important ones first; the last ones are left out if the store does not take all.
        """
        session = self._open()
        present = self._current_description(session)
        limit = TAG_VALUE_LENGTH if session.request.tracking_uri.startswith("azureml:") else NOTE_LENGTH
        merged = None if present is None else merge_description(present, lines, limit)
        if merged is not None:
            session.writer.put(Tags({NOTE_TAG: merged}))

    @rank_zero_only
    def log_file(self, file: Path, folder: str) -> None:
        """Put a file of this machine among the run's artifacts, in the background. It must stay until it is there.

        Args:
            file: the file.
            folder: its folder below the run's artifacts.
        """
        self._open().writer.put(DiskFile(f"{folder}/{file.name}", str(file.absolute())))

    def run_and_store(self) -> tuple[str | None, str]:
        """The run's id, None until it is known, and its tracking store without secrets."""
        return self.run_id, describe_store(resolve_tracking_uri(self._given_uri))

    def send_file(self, run_id: str, file: Path, folder: str) -> None:
        """Put a file among a run's artifacts now, from any rank.

        Args:
            run_id: the run, as rank 0 knows it.
            file: the file.
            folder: its folder below the run's artifacts.

        Raises:
            StoreAwayError, StoreRefusedError: the store does not take it.
        """
        with store_errors():
            client = one_attempt_client(resolve_tracking_uri(self._given_uri))
            send_file(client, run_id, file, f"{folder}/{file.name}")

    @rank_zero_only
    def log_event(self, event: Event) -> None:
        """Add an event to the file of events among the run's artifacts."""
        self._events.add(event)
        self.log_text(self._events.to_text(), self._events.path)

    def metric_at_start(self, name: str) -> float | None:
        """A metric's last value when the run was opened, from a previous attempt of the job. Call it only on rank 0."""
        run = self._open().run
        value = None if run is None else run.run.data.metrics.get(clean_name(name))
        return None if value is None else float(value)

    def tag_at_start(self, name: str) -> str | None:
        """A tag's value when the run was opened, from a previous attempt of the job. Call it only on rank 0."""
        run = self._open().run
        value = None if run is None else run.run.data.tags.get(name)
        return None if value is None else str(value)

    @rank_zero_only
    def continue_run(self) -> None:
        """Do not log again what previous attempts of the job have logged.

        Call it before training resumes from a checkpoint and repeats steps. Of each metric, the logger skips the steps
        up to the last one that the run has.
        """
        self._open().writer.skip_logged_before()

    def pending_metrics(self) -> list[list[Any]]:
        """The pending metrics, in order, as lists of name, value, step and ms since 1970."""
        metrics = self._session.writer.pending_metrics() if self._session is not None else []
        return [[each.key, each.value, each.step, each.timestamp] for each in metrics]

    @rank_zero_only
    def log_pending(self, metrics: list[list[Any]]) -> None:
        """Queue what `pending_metrics` returned in a previous attempt of the job. Call it after `continue_run`."""
        for (step, at), group in groupby(metrics, key=lambda each: (each[2], each[3])):
            self._open().writer.put(Metrics({name: value for name, value, _, _ in group}, step, at))

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything logged so far is written; return False if the store took nothing for `timeout_s`."""
        return self._session is None or self._session.writer.flush(timeout_s)

    @override
    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        session = self._session
        if session is None:
            return
        complete = session.writer.flush()
        if complete and self._checkpoint_callback:
            self._scan_and_log_checkpoints(self._checkpoint_callback)
        if session.request.run_id is None:
            # Lightning passes "failed" from inside an `except` clause. The exception tells whether the run was killed.
            killed = isinstance(sys.exc_info()[1], (SIGTERMException, KeyboardInterrupt))
            final = "KILLED" if killed else _RUN_STATUS.get(status, status)
            session.writer.put(End(final, int(time.time() * 1000)))
        session.writer.close(60.0 if complete else 0.0)
        session.termination.remove()

    @override
    def _scan_and_log_checkpoints(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Upload checkpoints, or warn why not.

        If the store is away, the checkpoints stay on disk and training continues.
        """
        session = self._session
        try:
            if session is not None and (session.run is None or session.writer.is_away):
                raise ConnectionError("MLflow is away")
            super()._scan_and_log_checkpoints(checkpoint_callback)
        except Exception as error:  # whatever a store of artifacts raises
            text = redact_text(f"{type(error).__name__}: {error}")
            where = checkpoint_callback.dirpath
            warnings.warn(f"Checkpoints stay in {where} and are not uploaded now: {text}", stacklevel=2)

    def _current_description(self, session: _Session) -> str | None:
        """The run's description now; None if it is unknown."""
        self.flush(_OPENING_S)  # a description may still be in the queue
        if session.run is None:
            return "" if session.request.run_id is None else None
        try:
            with store_errors():
                tags = session.run.client.get_run(session.run.run_id).data.tags
        except (StoreAwayError, StoreRefusedError):
            return None
        return str(tags.get(NOTE_TAG, ""))

    def _drop_repeated_epoch(self, values: dict[str, SupportsFloat], name: str, step: int) -> None:
        """Take out the `epoch` that Lightning adds to each call, if the step has it already.

        The last step of an epoch is logged several times: as a step, and with the values of the validation and the
        epoch.
        """
        epoch = values.get(name)
        if not isinstance(epoch, float):
            return
        if self._last_epoch == (step, epoch):
            del values[name]
        self._last_epoch = step, epoch

    def _accept(self, metrics: Mapping[str, Any]) -> dict[str, SupportsFloat]:
        """Keep the values that are numbers; warn about the first other value of each metric."""
        accepted = {}
        for name, value in metrics.items():
            try:
                accepted[clean_name(name)] = as_number(value)
            except ValueError as reason:
                self._warn_once(name, f"Metric {name} is left out here, its value is a {type_name(value)}: {reason}.")
        copy_to_host(accepted.values())
        return accepted

    def _step(self, step: Any, values: dict[str, SupportsFloat]) -> int:
        try:
            number = as_step(0 if step is None else step)
        except ValueError as reason:
            self._warn_once("", f"{', '.join(values)} of step {step!r} are left out, the step is unusable: {reason}.")
            values.clear()
            return 0
        if step is not None and number != step:
            self._warn_once("", f"Metrics of step {step!r} are logged at step {number}: MLflow's steps are integers.")
        return number

    def _warn_once(self, name: str, text: str) -> None:
        """Warn once for each metric, at the user's call of `log_metrics`."""
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"{text} Training goes on; this is said once.", stacklevel=5)

    def _open(self) -> _Session:
        if self._session is None:
            request = request_run(
                resolve_tracking_uri(self._given_uri),
                self._run_id or os.environ.get("MLFLOW_RUN_ID"),
                self._given_experiment,
                self._given_name,
                self.tags,
                self._given_location,
                self._suggested_name,
            )
            folder = self._folder if self._folder is not None else _JOB_FOLDER if read_job() is not None else "."
            self._session = _Session(request, Path(folder), self._flush_interval_s)
        if self._run_id is None and self._session.run is not None:
            self._run_id = self._session.run.run_id
        return self._session

    def __getstate__(self) -> dict[str, Any]:
        # The thread of the session cannot be copied. The copy joins the run, and the original ends it.
        return {**self.__dict__, "_session": None}


def job_loggers(trainer: Trainer) -> list[JobMLFlowLogger]:
    """Return the Trainer's loggers into MLflow runs of jobs."""
    return [each for each in trainer.loggers if isinstance(each, JobMLFlowLogger)]


def _is_rank_zero() -> bool:
    return bool(rank_zero_only.rank == 0)  # type: ignore[attr-defined]
