"""Writes a trace, sums it up and sends its files to the artifacts of the MLflow run, beside the training."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from rich.table import Table

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.channel import StoreLostError
from azureml_strategy.control.store import ControlStore, ExchangeClosedError
from azureml_strategy.interfaces import KeepsFiles
from azureml_strategy.profiling.kernel_names import shorten
from azureml_strategy.profiling.request import Profile
from azureml_strategy.profiling.session import Session
from azureml_strategy.tracking.run import is_remote
from azureml_strategy.tracking.tables import print_table

log = logging.getLogger(__name__)

FOLDER = "profile"
# Sending a larger one would take the network, and the end of the run, for minutes.
MOST_UPLOADED_BYTES = 100_000_000
_KEY = "mlflow_run"
# How long a rank waits for rank 0 to share the run's id, and its pause between two looks.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 20.0, 0.2

# Enough time to read and compress one trace on a slow disk.
_SUMMARY_SECONDS = 600.0
_SHOWN = 8
# Traces are written one after the other, also those of different fits and callbacks: they share the summary's file.
_writing = threading.Lock()


class Uploader:
    """Keeps files with the MLflow run. Rank 0 gives its files to its logger; the other ranks send theirs themselves.

    The other ranks do not know the run's id, so rank 0 shares it through the control store. A tracking store that is a
    file can be reached from its own machine only.
    """

    def __init__(self, trainer: Trainer, store: ControlStore | None) -> None:
        self._loggers = [each for each in trainer.loggers if isinstance(each, KeepsFiles)]
        self._rank = trainer.global_rank
        self._store = store

    def share_run(self) -> None:
        """Share the run's id with the other ranks. It may wait for the tracking store."""
        if self._rank > 0 or self._store is None or not self._loggers:
            return
        run_id, address = self._loggers[0].run_and_store()
        if run_id is not None:
            self._store.set(_KEY, json.dumps([run_id, address, socket.gethostname()]))

    def find_run(self) -> str | None:
        """Return what rank 0 has shared, for `send`; None on rank 0 itself, and where it has shared nothing.

        It is asked before a trace is written and summed up: rank 0 may have ended by then, and the store with it.
        """
        if self._rank == 0 or self._store is None or not self._loggers:
            return None
        deadline = time.monotonic() + _PATIENCE_SECONDS
        with suppress(StoreLostError, ExchangeClosedError):
            while time.monotonic() < deadline:
                if (message := self._store.get(_KEY)) is not None or self._store.pause(_PAUSE_SECONDS):
                    return message
        return None

    def send(self, files: Sequence[Path], run: str | None) -> str:
        """Send files to what `find_run` has returned.

        Returns:
            A sentence about those that remain only on this machine's disk, or an empty text.
        """
        small = [each for each in files if each.stat().st_size <= MOST_UPLOADED_BYTES]
        large = [each.name for each in files if each not in small]
        reason = self._try_to_send(small, run) if self._loggers else "there is no MLflow run"
        if reason:
            return f"It stays there, as {reason}."
        limit = f"{MOST_UPLOADED_BYTES / 1e6:.0f} MB"
        return f"{', '.join(large)} stays there: it has more than {limit}." if large else ""

    def _try_to_send(self, files: Sequence[Path], run: str | None) -> str | None:
        logger = self._loggers[0]
        if self._rank == 0:
            for each in files:
                logger.log_file(each, FOLDER)
            return None
        if run is None:
            return "rank 0 has not told this rank the MLflow run"
        run_id, address, host = json.loads(run)
        try:
            if logger.run_and_store()[1] != address or not (is_remote(address) or host == socket.gethostname()):
                return f"the MLflow store of rank 0 cannot be reached from {socket.gethostname()}"
            for each in files:
                logger.send_file(run_id, each, FOLDER)
        except RuntimeError as error:  # the tracking store
            return f"MLflow does not take it: {redact_text(str(error))}"
        return None


class ProfileWriter:
    """Writes the traces of one rank on background threads, has another process sum them up, and uploads both.

    The files are in `profile` in the run's folder.
    """

    def __init__(self, folder: Path, rank: int, uploader: Uploader) -> None:
        self._folder = (folder / FOLDER).absolute()
        self._rank = rank
        self.uploader = uploader
        self._threads: list[threading.Thread] = []

    def write(self, session: Session, plan: Profile, done: Callable[[str], None]) -> None:
        """Write the trace of a stopped session in the background, then call `done` with one sentence."""
        thread = threading.Thread(target=self._write, args=(session, plan, done), name="profile-writer", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long until everything is written and uploaded, and return whether it is."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _write(self, session: Session, plan: Profile, done: Callable[[str], None]) -> None:
        steps = plan.steps
        name = f"trace_rank_{self._rank}_{steps.replace(' ', '_')}"
        # A second fit, or another run in this folder, counts its steps from 0 again.
        paths = (self._folder / f"{name}{f'_{number}' if number > 1 else ''}.json" for number in count(1))
        free = (each for each in paths if not each.exists() and not each.with_name(f"{each.name}.gz").exists())
        run = self.uploader.find_run()
        with _writing:
            try:
                plain = next(free)
                session.write(plain)
                trace, summary = self._sum_up(plain, plan.last)
                where = self.uploader.send([trace] if summary is None else [trace, summary], run)
                if self._rank == 0 and summary is not None:
                    _print(json.loads(summary.read_text(encoding="utf-8")), steps, trace)
                done(f"{steps} of rank {self._rank}: {trace}. {where}".strip())
            except Exception as error:  # whatever the disk or the store does, the training goes on
                text = redact_text(f"{type(error).__name__}: {error}")
                log.warning("The profile of %s of rank %d cannot be kept: %s", steps, self._rank, text)
                done(f"the profile of {steps} of rank {self._rank} cannot be kept: {text}")

    def _sum_up(self, plain: Path, last: int) -> tuple[Path, Path | None]:
        """Sum the trace up and compress it in another process. Return the trace, and the summary if there is one."""
        summary = self._folder / f"summary_rank_{self._rank}.json"
        summary.unlink(missing_ok=True)  # of the profile before
        module = "azureml_strategy.profiling.trace_summary"
        command = [sys.executable, "-m", module, str(plain), str(summary), str(last)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SUMMARY_SECONDS, check=False)
        if ended.returncode:
            log.warning("The trace of rank %d is not summed up: %s", self._rank, ended.stderr.strip()[-500:])
        zipped = plain.with_name(f"{plain.name}.gz")
        return zipped if zipped.exists() else plain, summary if summary.exists() else None


def _print(summary: dict[str, Any], steps: str, trace: Path) -> None:
    """Print a summary as a table."""
    window = summary["window_s"] or 1.0
    device = "the GPU" if summary["device"] == "gpu" else "the CPU"
    table = Table(title=f"Profile of {steps} on rank 0, times on {device}")
    for heading in ("", "ms", "share", "calls"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    rows = [
        ("computing", summary["compute_s"], 0),
        ("communication, exposed", summary["exposed_communication_s"], 0),
        *((f"  {each['name']}", each["exposed_s"], each["calls"]) for each in summary["collectives"]),
        ("copies", summary["copy_s"], 0),
        ("idle", summary["idle_s"], 0),
        ("  waiting for data", summary["data_wait_s"], 0),
        *((shorten(each["name"]), each["self_s"], each["calls"]) for each in summary["operators"][:_SHOWN]),
    ]
    for name, seconds, calls in rows:
        table.add_row(name, f"{1e3 * seconds:,.2f}", f"{seconds / window:.1%}", str(calls or ""))
    print_table(table, [f"Open it at https://ui.perfetto.dev: {trace}"])
