"""Handles an alarm: all ranks report, one rank diagnoses, all read its verdict, and the records are kept."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.pytorch import Trainer

from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.channel import within
from azureml_strategy.control.process import Member, is_gone
from azureml_strategy.control.rendezvous import agent_serves_store
from azureml_strategy.control.store import ControlStore
from azureml_strategy.hang_detection import flight_recorder
from azureml_strategy.hang_detection.diagnosis import Evidence, Verdict, reach_verdict
from azureml_strategy.hang_detection.flight_recorder import Trace
from azureml_strategy.hang_detection.main_thread import communicates, frames_of, place
from azureml_strategy.hang_detection.peers import PASSING, Alarm, Heartbeat, Message, Peers, Report
from azureml_strategy.interfaces import RunLogger

# A tracking server that does not answer must not delay the end of the process.
_FLUSH_SECONDS = 8.0
# A file system that hangs must not delay it either; it may be the cause of the alarm.
_WRITE_SECONDS = 5.0
_ENDS = "The processes that wait for it end with exit code 75."
_GOES_ON = (
    "Nothing is ended, as this may pass; the watch goes on. HangWatch(kill=True) or AZUREML_STRATEGY_HANG_WATCH=kill "
    "ends the job instead."
)

# Time to report. To look up the frames of its recorder, torch imports its compiler, which is slow.
_REPORT_SECONDS, _STACKS_SECONDS = 20.0, 15.0
# Time for all ranks to read the verdict before rank 0 ends, and the store with it.
_READ_SECONDS = 5.0
_PAUSE_SECONDS = 0.05
# Time for the kernel to remove a process whose connections are closed already.
_DYING_SECONDS = 5.0


class HangReporter:
    """Reports what happens in a run that hangs: on standard error, in files, and as tags of the MLflow run.

    The files go to `hang.attempt_N` in a folder, by default the `run_folder`.
    """

    def __init__(self, trainer: Trainer, folder: str | os.PathLike[str] | None) -> None:
        job = read_job()
        self._attempt = job.attempt if job else 0
        self._trainer = trainer
        root = Path(folder) if folder is not None else run_folder(trainer)
        self._folder = (root / f"hang.attempt_{self._attempt}").resolve()

    def report(self, verdict: Verdict) -> None:
        """Print the verdict, write it to a file unless it is about an exception, and tag the run."""
        if verdict.kind == "ended":  # the exception itself is in the log
            say(verdict.headline)
        else:
            text = f"{verdict.text}\n{_ENDS if verdict.final else _GOES_ON}"
            say(f"{text} Kept in {self._folder}.")
            self._write("report.txt", f"{redact_text(text)}\n\n".encode(), add=True)
        tag = f"{'failed' if verdict.final else 'hang'}.attempt_{self._attempt}"
        for logger in self._trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.log_tags({tag: verdict.headline})
                if not logger.flush(_FLUSH_SECONDS):
                    say(f"MLflow has not taken the tag {tag} in time.")

    def note(self, text: str) -> None:
        """Print a message about a hang, and add it to the file."""
        say(text)
        self._write("report.txt", f"{redact_text(text)}\n\n".encode(), add=True)

    def keep_trace(self, trace: Trace) -> None:
        """Write this rank's flight recorder to a file that `torchfrtrace` finds."""
        self._write(f"flight_recorder/rank_{self._trainer.global_rank}", pickle.dumps(trace))

    def _write(self, name: str, content: bytes, add: bool = False) -> None:
        path = self._folder / name

        def write() -> bool:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab" if add else "wb") as file:
                    file.write(content)
            except OSError as error:
                say(f"{path} cannot be written: {error}")
            return True

        if within(_WRITE_SECONDS, write) is None:
            say(f"{path} is not written: the file system does not answer.")


def run_folder(trainer: Trainer) -> Path:
    """Return the Trainer's `default_root_dir`; but `logs` in an Azure ML job whose Trainer has none.

    A job's working folder is lost with its node. Azure ML uploads `logs`.
    """
    root = Path(trainer.default_root_dir)
    return Path("logs") if read_job() is not None and root.resolve() == Path.cwd() else root


def say(text: str) -> None:
    """Print a message at once and in one piece: the process may end right after."""
    print(redact_text(text), file=sys.stderr, flush=True)


def name_ended_processes(rank: int, members: Mapping[int, Member], store_answers: Callable[[], bool]) -> str | None:
    """Name the process that has ended when no watch runs: ask the kernel, then see whether rank 0's store is there.

    Return the headline, which is also printed; None if no process is known to be gone.
    """
    gone: tuple[int, ...] = ()
    deadline = time.monotonic() + _DYING_SECONDS
    while not gone and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        gone = tuple(other for other, member in sorted(members.items()) if other != rank and is_gone(member))
    if gone:
        alarm = Alarm("gone", gone, "")
    elif rank > 0 and not store_answers():
        alarm = Alarm("unserved", (0,), store_server())
    else:
        return None
    headline = reach_verdict(Evidence(alarm, members, {}, {}, len(members))).headline
    say(f"Rank {rank}: {headline}")
    return headline


def store_server() -> str:
    """Return who serves the rendezvous store, in words that follow rank 0's name."""
    return "torchrun's agent on its node" if agent_serves_store() else "it"


@dataclass(frozen=True)
class Outcome(Message):
    """The part of a verdict that all ranks read, and the rank that reached it: -1 if none did in time.

    If it is final, the processes that wait are to end.
    """

    headline: str
    final: bool
    judge: int


class AlarmHandler:
    """Handles the alarms on this rank, one after the other.

    The reporter reports the verdict, and keeps it and this rank's flight recorder. With `kill`, any alarm on which this
    rank reaches the verdict ends the job.
    """

    def __init__(self, store: ControlStore, peers: Peers, main_thread: int, reporter: HangReporter, kill: bool) -> None:
        self._store = store
        self._peers = peers
        self._rank = store.rank
        self._world_size = len(peers.members)
        self._main_thread = main_thread
        self._reporter = reporter
        self._kill = kill
        self._since = time.time()
        self._number = 0

    def alarm(self) -> Alarm | None:
        """Return the alarm that another rank has raised; skip alarms that passed while this rank could not answer."""
        while raised := self._store.get(self._key("alarm")):
            verdict = self._store.get(self._key("verdict"))
            if verdict is None or Outcome.from_json(verdict).final:
                return Alarm.from_json(raised)
            self._number += 1
        return None

    def open(self, alarm: Alarm) -> Alarm:
        """Raise an alarm unless another rank was faster; return the alarm that was raised first."""
        return Alarm.from_json(self._store.set_first(self._key("alarm"), alarm.to_json()))

    def hold(self, alarm: Alarm, heartbeat: Heartbeat, failed: bool) -> Outcome:
        """Report where this rank is, then reach or read the verdict.

        Raises:
            StoreLostError: the store has ended meanwhile, or does not answer.
        """
        report, trace = self._report(alarm, heartbeat, failed)
        self._store.set(self._key(f"report/{self._rank}"), report.to_json())
        self._keep(alarm, trace)
        self._peers.listen()
        left = {rank for rank, heartbeat in self._peers.heartbeats().items() if heartbeat.over}
        missing = set(alarm.ranks) if alarm.kind != "ended" else set()
        answering = [rank for rank in range(self._world_size) if rank not in missing | left]
        outcome = self._judge(alarm, answering) if self._rank == min(answering) else self._wait_for_verdict(alarm)
        self._store.set(self._key(f"read/{self._rank}"), "")
        if self._rank == 0 and outcome.final:
            keys = [self._key(f"read/{rank}") for rank in answering]
            self._until(lambda: None not in self._store.get_all(keys).values(), _READ_SECONDS)
        self._number += 1
        return outcome

    def report_alone(self, alarm: Alarm, heartbeat: Heartbeat, failed: bool) -> str:
        """Reach a verdict and record it when the other ranks cannot be asked; return its headline."""
        report, trace = self._report(alarm, heartbeat, failed)
        headline = self._verdict(alarm, {self._rank: report}).headline
        self._reporter.note(f"Rank {self._rank}: {headline}")
        self._keep(alarm, trace)
        return headline

    def resolve(self, seconds: float) -> None:
        """Record that the hang of the last alarm has passed, so many seconds after it."""
        self._reporter.note(f"Rank {self._rank}: the ranks go on, {seconds:.0f} s after they were reported to hang.")

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _report(self, alarm: Alarm, heartbeat: Heartbeat, failed: bool) -> tuple[Report, flight_recorder.Trace | None]:
        frames = frames_of(self._main_thread)
        trace = None
        if alarm.kind == "stalled":  # the frames may take too long, as the main thread may hang in an import
            trace = within(_STACKS_SECONDS, lambda: flight_recorder.record(True, self._since))
        if trace is None:
            trace = flight_recorder.record(False, self._since)
        shown = flight_recorder.collectives(trace) if trace is not None else []
        return Report(heartbeat, shown, frames, place(frames), communicates(frames), failed), trace

    def _keep(self, alarm: Alarm, trace: flight_recorder.Trace | None) -> None:
        if trace is not None and alarm.kind != "ended":
            self._reporter.keep_trace(trace)

    def _judge(self, alarm: Alarm, answering: list[int]) -> Outcome:
        verdict = self._verdict(alarm, self._collect_reports(answering))
        verdict = replace(verdict, final=verdict.final or self._kill)
        outcome = Outcome(verdict.headline, verdict.final, self._rank)
        self._store.set(self._key("verdict"), outcome.to_json())
        self._reporter.report(verdict)
        return outcome

    def _verdict(self, alarm: Alarm, reports: Mapping[int, Report]) -> Verdict:
        heartbeats = self._peers.heartbeats()
        return reach_verdict(Evidence(alarm, self._peers.members, heartbeats, reports, self._world_size))

    def _collect_reports(self, answering: list[int]) -> dict[int, Report]:
        texts: dict[str, str | None] = {}
        keys = [self._key(f"report/{rank}") for rank in answering]

        def complete() -> bool:
            texts.update(self._store.get_all(keys))
            return all(texts.values())

        self._until(complete, _REPORT_SECONDS)
        return {rank: Report.from_json(text) for rank, text in zip(answering, texts.values(), strict=True) if text}

    def _wait_for_verdict(self, alarm: Alarm) -> Outcome:
        verdict = ""

        def is_reached() -> bool:
            nonlocal verdict
            verdict = self._store.get(self._key("verdict")) or ""
            return bool(verdict)

        self._until(is_reached, 2 * _REPORT_SECONDS)
        outcome = Outcome("There was an alarm, but no rank has said why in time.", alarm.kind not in PASSING, -1)
        if verdict:
            outcome = Outcome.from_json(verdict)
        if alarm.ranks != (self._rank,):  # otherwise this rank's own message comes next
            say(f"Rank {self._rank}: {outcome.headline}")
        return outcome

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
