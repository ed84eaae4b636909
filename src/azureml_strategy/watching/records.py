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
from azureml_strategy.control.channel import within
from azureml_strategy.watching.recorder import Trace
from azureml_strategy.watching.verdict import Verdict

# A server that does not answer must not hold up the end.
_FLUSH_SECONDS = 8.0
# Nor must a file system that hangs, which may be the very reason of it all.
_WRITE_SECONDS = 5.0
_ENDS = "The processes that wait for it end with exit code 75."
_GOES_ON = (
    "Nothing is ended, as this may pass; the watch goes on. HangWatch(kill=True) or AZUREML_STRATEGY_HANG_WATCH=kill "
    "ends the job instead."
)


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
            text = f"{verdict.text}\n{_ENDS if verdict.final else _GOES_ON}"
            say(f"{text} Kept in {self._folder}.")
            self._write("report.txt", f"{redact_text(text)}\n\n".encode(), add=True)
        self._tag("failed" if verdict.final else "hang", verdict.headline)

    def note(self, text: str) -> None:
        """Print what has become of a hang that was reported, and keep it.

        Args:
            text: what to say.
        """
        say(text)
        self._write("report.txt", f"{redact_text(text)}\n\n".encode(), add=True)

    def keep_trace(self, trace: Trace) -> None:
        """Keep this rank's flight recorder, where `torchfrtrace` finds it.

        Args:
            trace: what it holds.
        """
        self._write(f"flight_recorder/rank_{self._trainer.global_rank}", pickle.dumps(trace))

    def _write(self, name: str, content: bytes, add: bool = False) -> None:
        path = self._folder / name
        if within(_WRITE_SECONDS, lambda: _try_to_write(path, content, add)) is None:
            say(f"{path} is not written: the file system does not answer.")

    def _tag(self, what: str, headline: str) -> None:
        name = f"{what}.attempt_{self._attempt}"
        for logger in self._trainer.loggers:
            if isinstance(logger, _RunLogger):
                logger.log_tags({name: headline})
                if not logger.flush(_FLUSH_SECONDS):
                    say(f"MLflow has not taken the tag {name} in time.")


def _try_to_write(path: Path, content: bytes, add: bool) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if add else "wb") as file:
            file.write(content)
    except OSError as error:
        say(f"{path} cannot be written: {error}")
    return True


def _default_folder(trainer: Trainer) -> Path:
    root = Path(trainer.default_root_dir)
    return Path("logs") if read_job() is not None and root.resolve() == Path.cwd() else root


def say(text: str) -> None:
    """Print at once, and whole: the process may end right after."""
    print(redact_text(text), file=sys.stderr, flush=True)
