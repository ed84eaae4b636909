"""Writes a trace, sums it up and uploads it, beside the training."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rich.table import Table

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.profiling.kernel_names import shorten
from azureml_strategy.profiling.request import Profile
from azureml_strategy.profiling.session import Session
from azureml_strategy.profiling.upload import FOLDER, Uploader
from azureml_strategy.tracking.tables import print_table

log = logging.getLogger(__name__)

# Time for one trace to be read and compressed, on a slow disk.
_SUMMARY_SECONDS = 600.0
_SHOWN = 8
# One trace after the other, whichever fit or callback it is of: they share the file of the summary.
_writing = threading.Lock()


@dataclass(frozen=True)
class Kept:
    """Files of a profile on this rank.

    Attributes:
        trace: its trace.
        summary: its summary; None if there is none.
    """

    trace: Path
    summary: Path | None

    @property
    def files(self) -> list[Path]:
        """Both, without what is not there."""
        return [each for each in (self.trace, self.summary) if each is not None]


class ProfileWriter:
    """Writes the traces of one rank on threads of its own, and has a process of its own sum them up.

    Args:
        folder: the run's; the files lie in `profile` in it.
        rank: this process's global rank.
        uploader: sends the files to the run's artifacts.
    """

    def __init__(self, folder: Path, rank: int, uploader: Uploader) -> None:
        self._folder = (folder / FOLDER).absolute()
        self._rank = rank
        self._uploader = uploader
        self._threads: list[threading.Thread] = []

    def write(self, session: Session, plan: Profile, done: Callable[[str], None]) -> None:
        """Write a trace, soon.

        Args:
            session: stopped.
            plan: its steps.
            done: called with one sentence when all is done.
        """
        thread = threading.Thread(target=self._write, args=(session, plan, done), name="profile-writer", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until everything is written and uploaded, for this time in all; return whether it is."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _write(self, session: Session, plan: Profile, done: Callable[[str], None]) -> None:
        with _writing:
            self._write_alone(session, plan, done)

    def _write_alone(self, session: Session, plan: Profile, done: Callable[[str], None]) -> None:
        steps = plan.steps
        try:
            plain = self._free_path(f"trace_rank_{self._rank}_{steps.replace(' ', '_')}")
            session.write(plain)
            kept = self._sum_up(plain, plan.last)
            where = self._uploader.send(kept.files)
            if self._rank == 0 and kept.summary is not None:
                _print(json.loads(kept.summary.read_text(encoding="utf-8")), steps, kept.trace)
            done(f"{steps} of rank {self._rank}: {kept.trace}. {where}".strip())
        except Exception as error:  # whatever the disk or the store does, the training goes on
            text = redact_text(f"{type(error).__name__}: {error}")
            log.warning("The profile of %s of rank %d cannot be kept: %s", steps, self._rank, text)
            done(f"the profile of {steps} of rank {self._rank} cannot be kept: {text}")

    def _free_path(self, name: str) -> Path:
        """Where no trace lies yet: a second fit, or another run in this folder, counts its steps from 0 again."""
        paths = (self._folder / f"{name}{f'_{number}' if number > 1 else ''}.json" for number in count(1))
        return next(each for each in paths if not each.exists() and not each.with_name(f"{each.name}.gz").exists())

    def _sum_up(self, plain: Path, last: int) -> Kept:
        summary = self._folder / f"summary_rank_{self._rank}.json"
        summary.unlink(missing_ok=True)  # of the profile before
        module = "azureml_strategy.profiling.trace_summary"
        command = [sys.executable, "-m", module, str(plain), str(summary), str(last)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SUMMARY_SECONDS, check=False)
        if ended.returncode:
            log.warning("The trace of rank %d is not summed up: %s", self._rank, ended.stderr.strip()[-500:])
        zipped = plain.with_name(f"{plain.name}.gz")
        return Kept(zipped if zipped.exists() else plain, summary if summary.exists() else None)


def _print(summary: dict[str, Any], steps: str, trace: Path) -> None:
    """Print a summary as a table."""
    window = summary["window_s"] or 1.0
    device = "the GPU" if summary["device"] == "gpu" else "the CPU"
    table = Table(title=f"Profile of {steps} on rank 0, times on {device}")
    for heading in ("", "ms", "share", "calls"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for name, seconds, calls in _rows(summary):
        table.add_row(name, f"{1e3 * seconds:,.2f}", f"{seconds / window:.1%}", str(calls or ""))
    print_table(table, [f"Open it at https://ui.perfetto.dev: {trace}"])


def _rows(summary: dict[str, Any]) -> list[tuple[str, float, int]]:
    parts = [
        ("computing", summary["compute_s"], 0),
        ("communication, exposed", summary["exposed_communication_s"], 0),
        *((f"  {each['name']}", each["exposed_s"], each["calls"]) for each in summary["collectives"]),
        ("copies", summary["copy_s"], 0),
        ("idle", summary["idle_s"], 0),
        ("  waiting for data", summary["data_wait_s"], 0),
    ]
    operators = [(shorten(each["name"]), each["self_s"], each["calls"]) for each in summary["operators"][:_SHOWN]]
    return [*parts, *operators]
