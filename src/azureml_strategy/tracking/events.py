"""What happened in a run besides its metrics: warnings, preemptions, slow ranks. The page of the run shows them."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.redaction import redact_text

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Each event sends the whole artifact again, so it must stay small. The first events explain most, and the last ones
# show how the run ended.
_FIRST, _LAST = 200, 200
# Longer texts, such as tracebacks, are cut.
_TEXT_LENGTH = 2000

Kind = Literal["start", "stop", "crash", "hang", "slow_rank", "warning", "profile"]


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        kind: what sort of thing.
        text: one or two sentences, without secrets.
        step: the step at which metrics were logged then.
        time_ms: when, in ms since 1970.
    """

    kind: Kind
    text: str
    step: int
    time_ms: int = field(default_factory=lambda: int(time.time() * 1000))


@runtime_checkable
class RecordsEvents(Protocol):
    """A logger that keeps events with its run, such as `JobMLFlowLogger`."""

    def log_event(self, event: Event) -> None:
        """Keep an event."""
        ...


class EventLog:
    """The first and the last events of this attempt of a job."""

    def __init__(self) -> None:
        self._first: list[Event] = []
        self._last: deque[Event] = deque(maxlen=_LAST)
        self._left_out = 0

    @property
    def path(self) -> str:
        """Its path among the run's artifacts; each attempt of a job has its own."""
        job = read_job()
        return f"events/attempt_{job.attempt if job is not None else 0}.jsonl"

    def add(self, event: Event) -> None:
        """Add an event."""
        if len(self._first) < _FIRST:
            self._first.append(event)
            return
        self._left_out += len(self._last) == _LAST
        self._last.append(event)

    def to_text(self) -> str:
        """One line of JSON for each event, in order."""
        kept = [*self._first, *self._last]
        if self._left_out:
            after = self._first[-1]
            text = f"{self._left_out:,} events between are left out, as there were too many."
            kept.insert(len(self._first), Event("warning", text, after.step, after.time_ms))
        return "".join(f"{json.dumps(asdict(event))}\n" for event in kept)


def record_event(trainer: Trainer, kind: Kind, text: str) -> None:
    """Give an event to each logger that records events. On ranks other than 0, those do nothing."""
    event = Event(kind, redact_text(text)[:_TEXT_LENGTH], trainer.global_step)
    for logger in trainer.loggers:
        if isinstance(logger, RecordsEvents):
            logger.log_event(event)
