"""Leaves the page of a run among its artifacts and in its output folder when the run ends, however it ends."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from platform import python_version

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from azureml_strategy.cluster.environ import PAGE_SWITCH, copied, switched_off
from azureml_strategy.cluster.isolation import IsolatedCallback
from azureml_strategy.cluster.job import read_job
from azureml_strategy.files import write_atomically
from azureml_strategy.lazy import install_line
from azureml_strategy.network.doctor.software import installed_version
from azureml_strategy.tracking.events import record_event
from azureml_strategy.tracking.logger import JobMLFlowLogger, job_loggers

log = logging.getLogger(__name__)

PAGE, PLACE = "report.html", "run.json"
"""The page, and the file beside it that says in which store its run is."""
# A page takes some three seconds, and more on a machine that is busy ending a run.
_LONGEST_S = 120.0
# Azure ML gives a preempted node about 30 seconds; checkpoint and metrics come first.
_FLUSH_AT_SIGTERM_S, _LONGEST_AT_SIGTERM_S = 5.0, 8.0
_LIBRARIES = ("azureml-strategy", "torch", "lightning", "mlflow", "transformers", "deepspeed")


class RunPage(IsolatedCallback):
    """Writes `report.html` into the run's artifacts and its output folder when `fit` ends, also by an exception.

    The page is what `azureml-strategy report RUN` shows: what the run waited for most, what to try and what that would
    gain, then charts. A process of its own makes it, on rank 0, after all metrics are written, in bounded time: at
    SIGTERM some seconds. A page that cannot be made is one warning. The callback also records when each attempt began
    and why it ended, the versions of libraries as the tag `azureml_strategy.versions`, and the run's place in
    `run.json`, so that `report` takes the folder as well. It needs a `JobMLFlowLogger`, and matplotlib and jinja2 (the
    extra `report`).

    Args:
        folder: for `report.html` and `run.json`; None is the Trainer's `default_root_dir`.
    """

    switch = PAGE_SWITCH

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._folder = folder

    @override
    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logger = self._logger(trainer)
        if logger is None:
            return
        logger.log_tags({"azureml_strategy.versions": _versions()})
        job = read_job()
        record_event(trainer, "start", f"Attempt {job.attempt} begins." if job is not None else "The run begins.")
        place = logger.location
        if place is not None:
            content = {"run_id": place.run_id, "store": place.store, "experiment": place.experiment}
            write_atomically(self._path(trainer, PLACE), json.dumps(content, indent=2).encode())

    @override
    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer, "FINISHED")

    @override
    @rank_zero_only
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._logger(trainer) is None:
            return
        if isinstance(exception, SIGTERMException):
            record_event(trainer, "stop", "SIGTERM ended the run: a preemption, or the job was cancelled.")
            self._leave(trainer, "KILLED")
        elif isinstance(exception, KeyboardInterrupt):
            record_event(trainer, "stop", "Ctrl-C ended the run.")
            self._leave(trainer, "KILLED")
        else:
            record_event(trainer, "crash", f"{type(exception).__name__}: {exception}")
            self._leave(trainer, "FAILED")

    def _logger(self, trainer: Trainer) -> JobMLFlowLogger | None:
        if switched_off(os.environ, PAGE_SWITCH):
            return None
        return next(iter(job_loggers(trainer)), None)

    def _path(self, trainer: Trainer, name: str) -> Path:
        return Path(self._folder or trainer.default_root_dir) / name

    def _leave(self, trainer: Trainer, status: str) -> None:
        """Make the page of the run as it is in its store now, and put it where it belongs."""
        logger = self._logger(trainer)
        if logger is None:
            return
        missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
        if missing:
            log.warning(
                f"The run has no page, as %s is not installed: {install_line('report')}. "
                "tracking.page=null leaves it out.",
                " and ".join(missing),
            )
            return
        killed = status == "KILLED"
        place = logger.location if logger.flush(_FLUSH_AT_SIGTERM_S if killed else 60.0) else None
        if place is None:
            log.warning("The run has no page: its store does not answer. Later: azureml-strategy report RUN")
            return
        longest_s = _LONGEST_AT_SIGTERM_S if killed else _LONGEST_S
        text = _make(place.run_id, logger.tracking_uri, status, longest_s)
        path = self._path(trainer, PAGE)
        write_atomically(path, text.encode())
        logger.log_text(text, PAGE)
        log.info("What this run waited for: %s", path.absolute())


def _make(run_id: str, tracking_uri: str, status: str, longest_s: float) -> str:
    """Make the page in another process, which can be ended. This one keeps its memory and matplotlib's settings."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / PAGE
        command = [sys.executable, "-m", "azureml_strategy.cli", "report", run_id, "--output", str(page)]
        options = ["--status", status, "--seconds", str(longest_s / 3)]
        # The store's address may hold a password, which a command line would show to everybody.
        environ = {**copied(os.environ), "MLFLOW_TRACKING_URI": tracking_uri}
        done = subprocess.run(
            [*command, *options],
            env=environ,
            timeout=longest_s,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            start_new_session=True,  # so that a signal to the job's processes does not end it
        )
        if done.returncode:
            raise RuntimeError(f"azureml-strategy report ended with {done.returncode}: {done.stderr[-2000:]}")
        return page.read_text(encoding="utf-8")


def _versions() -> str:
    """The versions of Python, this project and the most important libraries that are installed."""
    installed = ((name, installed_version(name)) for name in _LIBRARIES)
    return ", ".join([f"python {python_version()}", *(f"{name} {found}" for name, found in installed if found)])
