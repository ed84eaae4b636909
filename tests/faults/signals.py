"""Signals to any rank, at any place: SIGKILL, as when a machine fails, and SIGTERM, as when Azure ends a job."""

from __future__ import annotations

import random

from tests.faults.fault import Fault
from tests.faults.orders import Order

# How often a place may be passed before the signal comes; the first few, so that the signal comes before the end.
_OCCURRENCES = {"step": 12, "validation": 6, "writing": 3, "checking": 4, "committing": 3, "marked": 3, "committed": 3}
# A signal that comes a little later than its place: inside of what is done there.
_DELAYS = {"start": 1.0, "setup": 0.3, "reading": 0.05, "step": 0.02, "marked": 0.02, "validation": 0.01}
# Where only rank 0 is.
_OF_RANK_0 = ("reading", "marking", "marked", "committing", "committed", "deleting")
PLACES = (*("start", "setup", "step", "step", "step", "validation", "writing", "checking"), *_OF_RANK_0)
# After SIGTERM the ranks end with 143, unless training was over before they could.
_TERMINATED = frozenset({0, 143})


def kill(moments: random.Random, ranks: int) -> Fault:
    """SIGKILL to one rank, to some, or to all."""
    order = _order(moments, moments.choice(PLACES), _some(moments, ranks), "SIGKILL")
    return Fault("signals", order.text(), (order,))


def terminate(moments: random.Random, ranks: int) -> Fault:
    """SIGTERM to one rank, to some, or to all."""
    place = moments.choice(["step", "step", "validation", "marked", "committing", "setup", "start"])
    order = _order(moments, place, _some(moments, ranks), "SIGTERM")
    return Fault("signals", order.text(), (order,), _TERMINATED)


def _order(moments: random.Random, place: str, who: tuple[int, ...], signal: str) -> Order:
    if place in _OF_RANK_0:
        who = (0,)
    delay = moments.choice([0.0, moments.uniform(0, _DELAYS[place])]) if place in _DELAYS else 0.0
    return Order(place, moments.randint(1, _OCCURRENCES.get(place, 1)), who, signal, delay_s=round(delay, 4))


def _some(moments: random.Random, ranks: int) -> tuple[int, ...]:
    many = moments.choice([1, 1, moments.randint(1, ranks), ranks])
    return tuple(sorted(moments.sample(range(ranks), many)))
