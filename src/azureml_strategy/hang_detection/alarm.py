"""What the ranks do when there is an alarm: all report, one diagnoses, and everybody hears it. What is kept of it."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer

from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.channel import BoundedStore, agent_serves_store, within
from azureml_strategy.control.process import Member, is_gone
from azureml_strategy.hang_detection import flight_recorder
from azureml_strategy.hang_detection.diagnosis import Evidence, Verdict, reach_verdict
from azureml_strategy.hang_detection.flight_recorder import Trace
from azureml_strategy.hang_detection.main_thread import communicates, frames_of, place
from azureml_strategy.hang_detection.peers import PASSING, Alarm, Beat, Hearing, Report

# A server that does not answer must not hold up the end.
_FLUSH_SECONDS = 8.0
# Nor must a file system that hangs, which may be the very reason of it all.
_WRITE_SECONDS = 5.0
_ENDS = "The processes that wait for it end with exit code 75."
_GOES_ON = (
    "Nothing is ended, as this may pass; the watch goes on. HangWatch(kill=True) or AZUREML_STRATEGY_HANG_WATCH=kill "
    "ends the job instead."
)

# To report: torch looks up the frames of its recorder, for which it imports its compiler.
_REPORT_SECONDS, _STACKS_SECONDS = 20.0, 15.0
# For all to read the verdict, before rank 0 ends and the store with it.
_READ_SECONDS = 5.0
_PAUSE_SECONDS = 0.05
# For the kernel to take down a process whose connections have ended already.
_DYING_SECONDS = 5.0


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


def name_the_gone(rank: int, members: Mapping[int, Member], store_answers: Callable[[], bool]) -> str | None:
    """Which process has ended, where no watch can say so; asks the kernel, then whether rank 0's store is there.

    Args:
        rank: this process's, which has met the end of a connection.
        members: who was at the roll call.
        store_answers: whether another connection to the rendezvous store can be opened.

    Returns:
        The headline, which is printed; None if nobody is known to be gone.
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
    """Who serves the rendezvous store, in words that follow rank 0's name."""
    return "torchrun's agent on its node" if agent_serves_store() else "it"


@dataclass(frozen=True)
class Outcome:
    """What the ranks are told.

    Attributes:
        headline: of the verdict.
        final: whether the processes that wait are to end.
        judge: the rank that has reached it.
    """

    headline: str
    final: bool
    judge: int

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """The outcome from its text."""
        return cls(**json.loads(text))


class Inquiry:
    """The course of alarms on this rank, one after the other.

    Args:
        store: shared by the ranks.
        hearing: what is known of the others.
        rank: this process's global rank.
        world_size: number of ranks.
        main_thread: its `threading.get_ident`.
        records: keeps the verdict and this rank's flight recorder.
        kill: whether any alarm ends the job, where this rank is the judge.
    """

    def __init__(
        self,
        store: BoundedStore,
        hearing: Hearing,
        rank: int,
        world_size: int,
        main_thread: int,
        records: Records,
        kill: bool,
    ) -> None:
        self._store = store
        self._hearing = hearing
        self._rank = rank
        self._world_size = world_size
        self._main_thread = main_thread
        self._records = records
        self._kill = kill
        self._since = time.time()
        self._number = 0

    def alarm(self) -> Alarm | None:
        """The alarm that others have raised; one that passed while this rank could not answer is passed over."""
        while said := self._store.get(self._key("alarm")):
            verdict = self._store.get(self._key("verdict"))
            if verdict is None or Outcome.from_json(verdict).final:
                return Alarm.from_json(said)
            self._number += 1
        return None

    def open(self, alarm: Alarm) -> Alarm:
        """Raise an alarm, unless somebody was faster.

        Args:
            alarm: what is wrong.

        Returns:
            The alarm that counts.
        """
        return Alarm.from_json(self._store.set_first(self._key("alarm"), alarm.to_json()))

    def hold(self, alarm: Alarm, beat: Beat, failed: bool) -> Outcome:
        """Report, and hear the verdict.

        Args:
            alarm: what is wrong.
            beat: this rank's last sign of life.
            failed: whether this rank's main thread has met an exception.

        Raises:
            StoreLostError: rank 0 has ended meanwhile.
        """
        report, trace = self._report(alarm, beat, failed)
        self._store.set(self._key(f"report/{self._rank}"), report.to_json())
        self._keep(alarm, trace)
        self._hearing.listen()
        there = self._there(alarm)
        outcome = self._judge(alarm, there) if self._rank == min(there) else self._wait_for_verdict(alarm)
        self._store.add(self._key("read"))
        if self._rank == 0 and outcome.final:
            self._until(lambda: int(self._store.get(self._key("read")) or 0) >= len(there), _READ_SECONDS)
        self._number += 1
        return outcome

    def speak_alone(self, alarm: Alarm, beat: Beat, failed: bool) -> str:
        """Say what has happened, where the others cannot be asked.

        Args:
            alarm: what is wrong.
            beat: this rank's last sign of life.
            failed: whether this rank's main thread has met an exception.

        Returns:
            The verdict's headline.
        """
        report, trace = self._report(alarm, beat, failed)
        reports = {self._rank: report}
        members, beats = self._hearing.members, self._hearing.beats()
        headline = reach_verdict(Evidence(alarm, members, beats, reports, self._world_size)).headline
        self._records.note(f"Rank {self._rank}: {headline}")
        self._keep(alarm, trace)
        return headline

    def resolve(self, seconds: float) -> None:
        """Say that what the last alarm was about has passed.

        Args:
            seconds: how long ago the alarm was.
        """
        self._records.note(f"Rank {self._rank}: the ranks go on, {seconds:.0f} s after they were reported to hang.")

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _there(self, alarm: Alarm) -> list[int]:
        """The ranks that can answer."""
        left = {rank for rank, beat in self._hearing.beats().items() if beat.over}
        missing = set(alarm.ranks) if alarm.kind != "ended" else set()
        return [rank for rank in range(self._world_size) if rank not in missing | left]

    def _report(self, alarm: Alarm, beat: Beat, failed: bool) -> tuple[Report, flight_recorder.Trace | None]:
        frames = frames_of(self._main_thread)
        trace = self._record(stacks=alarm.kind == "stalled")
        shown = flight_recorder.collectives(trace) if trace is not None else []
        return Report(beat, shown, frames, place(frames), communicates(frames), failed), trace

    def _keep(self, alarm: Alarm, trace: flight_recorder.Trace | None) -> None:
        if trace is not None and alarm.kind != "ended":
            self._records.keep_trace(trace)

    def _record(self, stacks: bool) -> flight_recorder.Trace | None:
        """With the frames, unless they cannot be had in time: the main thread may hang in an import."""
        if not stacks:
            return flight_recorder.record(False, self._since)
        return within(_STACKS_SECONDS, lambda: flight_recorder.record(True, self._since)) or flight_recorder.record(
            False, self._since
        )

    def _judge(self, alarm: Alarm, there: list[int]) -> Outcome:
        reports = self._collect(there)
        members, beats = self._hearing.members, self._hearing.beats()
        verdict = reach_verdict(Evidence(alarm, members, beats, reports, self._world_size))
        verdict = replace(verdict, final=verdict.final or self._kill)
        outcome = Outcome(verdict.headline, verdict.final, self._rank)
        self._store.set(self._key("verdict"), json.dumps(asdict(outcome)))
        self._records.proclaim(verdict)
        return outcome

    def _collect(self, there: list[int]) -> dict[int, Report]:
        said: dict[str, str | None] = {}
        keys = [self._key(f"report/{rank}") for rank in there]

        def complete() -> bool:
            said.update(self._store.get_all(keys))
            return all(said.values())

        self._until(complete, _REPORT_SECONDS)
        return {rank: Report.from_json(text) for rank, text in zip(there, said.values(), strict=True) if text}

    def _wait_for_verdict(self, alarm: Alarm) -> Outcome:
        said = ""

        def spoken() -> bool:
            nonlocal said
            said = self._store.get(self._key("verdict")) or ""
            return bool(said)

        self._until(spoken, 2 * _REPORT_SECONDS)
        unsaid = Outcome("There was an alarm, but no rank has said why in time.", alarm.kind not in PASSING, -1)
        outcome = Outcome.from_json(said) if said else unsaid
        if alarm.ranks != (self._rank,):  # what it says itself comes next
            say(f"Rank {self._rank}: {outcome.headline}")
        return outcome

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
