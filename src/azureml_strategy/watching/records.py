"""What is kept of a hang: a report, every rank's flight recorder, and a tag of the MLflow run."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer

from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.watching.bounded import within
from azureml_strategy.watching.recorder import Trace
from azureml_strategy.watching.verdict import Verdict

# A server that does not answer must not hold up the end.
_FLUSH_SECONDS = 8.0
# Nor must a file system that hangs, which may be the very reason of it all.
_WRITE_SECONDS = 5.0


@runtime_checkable
class _RunLogger(Protocol):
    """What a `JobMLFlowLogger` can; this package does not know the tracking."""

    def log_tags(self, tags: dict[str, str]) -> None: ...

    def flush(self, timeout_s: float = ...) -> bool: ...


class Records:
    """Writes down what becomes of a run that hangs.

    Args:
        trainer: whose run it is.
        folder: for `hang.attempt_N`; None leaves it to the Trainer: its `default_root_dir`, or where that is the
            working folder of an Azure ML job, which goes with the node, `logs`, which is uploaded.
    """

    def __init__(self, trainer: Trainer, folder: str | os.PathLike[str] | None) -> None:
        job = read_job()
        self._attempt = job.attempt if job else 0
        self._trainer = trainer
        root = Path(folder) if folder is not None else _default_folder(trainer)
        self._folder = (root / f"hang.attempt_{self._attempt}").resolve()

    def proclaim(self, verdict: Verdict) -> None:
        """Print the verdict, and keep it.

        Args:
            verdict: what it was.
        """
        if verdict.kind == "ended":  # an exception speaks for itself
            say(verdict.headline)
        else:
            say(f"{verdict.text}\nKept in {self._folder}.")
            self._write("report.txt", redact_text(verdict.text).encode())
        self._tag(verdict.headline)

    def keep_trace(self, trace: Trace) -> None:
        """Keep this rank's flight recorder, where `torchfrtrace` finds it.

        Args:
            trace: what it holds.
        """
        self._write(f"flight_recorder/rank_{self._trainer.global_rank}", pickle.dumps(trace))

    def _write(self, name: str, content: bytes) -> None:
        path = self._folder / name
        if within(_WRITE_SECONDS, lambda: _try_to_write(path, content)) is None:
            say(f"{path} is not written: the file system does not answer.")

    def _tag(self, headline: str) -> None:
        for logger in self._trainer.loggers:
            if isinstance(logger, _RunLogger):
                logger.log_tags({f"failed.attempt_{self._attempt}": headline})
                if not logger.flush(_FLUSH_SECONDS):
                    say(f"MLflow has not taken the tag failed.attempt_{self._attempt} in time.")


def _try_to_write(path: Path, content: bytes) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        say(f"{path} cannot be written: {error}")
    return True


def _default_folder(trainer: Trainer) -> Path:
    root = Path(trainer.default_root_dir)
    return Path("logs") if read_job() is not None and root.resolve() == Path.cwd() else root


def say(text: str) -> None:
    """Print at once, and whole: the process may end right after."""
    print(redact_text(text), file=sys.stderr, flush=True)
