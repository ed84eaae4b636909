"""What a rank does to itself, or to the machine below it, when its training reaches a place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

# The variable through which a rank gets its orders.
VARIABLE = "FAULTS"
# The network namespace that it has to enter, a file: quicker than `ip netns exec`, which needs a new interpreter.
NAMESPACE_VARIABLE = "FAULTS_NAMESPACE"

# Where an order can be carried out. "Writing" and the places after it are told by the names that a checkpoint's files
# have on disk, whatever writes them.
PLACES = (
    "start",  # the script's first line
    "setup",  # the process group is there
    "reading",  # a file of the checkpoint to go on from is opened
    "step",  # the first layer of a training batch is about to run
    "validation",  # the same of a validation batch
    "marking",  # a checkpoint is about to be marked as under way
    "marked",  # it is marked, no byte of it is written
    "writing",  # a file of it is opened for writing
    "checking",  # a file of it is opened to be read back
    "committing",  # all its files are there, its manifest is about to be
    "committed",  # its manifest is there
    "deleting",  # a file of an older checkpoint is about to go
)


@dataclass(frozen=True)
class Order:
    """One thing to do at one place.

    Attributes:
        place: one of `PLACES`.
        occurrence: the how-manieth time in this attempt, from 1.
        ranks: who does it.
        signal: to send to oneself, such as `SIGKILL`; or
        command: to run, and to wait for, before training goes on.
        delay_s: how long after the place, in seconds; training goes on meanwhile.
    """

    place: str
    occurrence: int
    ranks: tuple[int, ...]
    signal: str = ""
    command: tuple[str, ...] = ()
    delay_s: float = 0.0

    def text(self) -> str:
        what = self.signal or " ".join(self.command)[:60]
        later = f" + {self.delay_s:.3f} s" if self.delay_s else ""
        return f"{what} of rank {','.join(map(str, self.ranks))} at {self.place} {self.occurrence}{later}"


def to_text(orders: Sequence[Order]) -> str:
    return json.dumps([asdict(order) for order in orders])


def from_text(text: str) -> list[Order]:
    listed = json.loads(text)
    return [Order(**{**each, "ranks": tuple(each["ranks"]), "command": tuple(each["command"])}) for each in listed]
