"""What a rank tells the others: that it lives, that something is wrong, and where it is then."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from azureml_strategy.watching.recorder import Collective
from azureml_strategy.watching.stack import Frames

# `ended`: by an exception. `gone`: its process. `vanished`: its node. `lost`: by what a collective says. `unserved`:
# rank 0's store. All of these are for ever; `silent` and `stalled` may pass.
Kind = Literal["ended", "gone", "vanished", "lost", "unserved", "silent", "stalled"]
PASSING: tuple[Kind, ...] = ("silent", "stalled")


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    Attributes:
        count: how many before.
        at: when, in seconds since 1970.
        over: whether the rank has left the run in order, and sends no more.
        phase: what its main thread does.
        step: its optimizer steps.
        idle_s: seconds since its main thread's last note.
        limit_s: how many it may take.
        entered: operations entered in each process group.
    """

    count: int
    at: float
    over: bool
    phase: str
    step: int
    idle_s: float
    limit_s: float
    entered: dict[str, int]

    def to_json(self) -> str:
        """The beat as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Beat:
        """The beat from its text."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Alarm:
    """What is wrong, as the first that noticed it says.

    Attributes:
        kind: what has happened.
        ranks: to which ranks; none where the reports must show it.
        text: the exception, or for how long, or who serves the store.
    """

    kind: Kind
    ranks: tuple[int, ...]
    text: str

    def to_json(self) -> str:
        """The alarm as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Alarm:
        """The alarm from its text."""
        values: dict[str, Any] = json.loads(text)
        return cls(values["kind"], tuple(values["ranks"]), values["text"])


@dataclass(frozen=True)
class Report:
    """Where a rank is when there is an alarm.

    Attributes:
        beat: its step, phase and idle time.
        collectives: of each process group the one it is in, or was in last; none without a flight recorder.
        stack: the innermost Python frames of its main thread, innermost first.
        place: the one of them to look at.
        communicates: whether that thread is inside a collective.
        failed: whether that thread has met an exception.
    """

    beat: Beat
    collectives: list[Collective]
    stack: Frames
    place: str
    communicates: bool
    failed: bool

    def to_json(self) -> str:
        """The report as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report from its text."""
        values: dict[str, Any] = json.loads(text)
        collectives = [Collective(**each | {"ranks": tuple(each["ranks"])}) for each in values["collectives"]]
        frames = [(file, number, name) for file, number, name in values["stack"]]
        return cls(**values | {"beat": Beat(**values["beat"]), "collectives": collectives, "stack": frames})

    @property
    def waits_in(self) -> Collective | None:
        """The collective that is not over, the first one if it is in several."""
        open_ones = [each for each in self.collectives if not each.over]
        return min(open_ones, key=lambda each: each.entered_at, default=None)

    @property
    def last(self) -> Collective | None:
        """The collective entered last of those shown."""
        return max(self.collectives, key=lambda each: each.entered_at, default=None)
