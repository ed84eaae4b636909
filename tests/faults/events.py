"""A service of Scheduled Events that announces, takes back, is slow, fails, or talks nonsense."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.checkpoint.scheduled_events_service import Answer, Service, event, events, serving
from tests.faults.fault import WELL, Attempt, Fault
from tests.faults.orders import Order

from azureml_strategy.cluster.environ import EVENTS_VARIABLE

_KINDS = ("Preempt", "Redeploy", "Reboot", "Terminate")
_NONSENSE = (b"", b"\xff\xfe\x00", b"[1, 2", b'{"Events": 7}', b"[]", b'{"Events": [{"EventId": {}}]}', b"{" * 10**5)


@dataclass(frozen=True)
class ServiceFault(Fault):
    """A service that only the last rank's node can ask, as on Azure.

    Attributes:
        play: sets the service up; it gets the file that exists from the announcement on.
    """

    play: Callable[[Service, Path], None] = lambda service, announced: None

    @contextmanager
    def around(self, attempt: Attempt) -> Iterator[None]:
        announced = attempt.output / "announced"
        announced.unlink(missing_ok=True)
        with serving() as service:
            self.play(service, announced)
            last = attempt.ranks - 1
            attempt.rank_environ.setdefault(last, {})[EVENTS_VARIABLE] = service.url
            yield
            if service.asked and not self.orders:
                attempt.met.append(self)


def withdrawn(moments: random.Random, ranks: int, output: Path) -> Fault:
    """Announced, and taken back a little later: training must go on, having lost nothing."""
    kind, lasts = moments.choice(_KINDS), round(moments.uniform(0.1, 2.0), 2)

    def play(service: Service, announced: Path) -> None:
        service.answer = lambda: _for_a_while(announced, lasts, event(kind, 30))

    return ServiceFault(
        "events", f"{kind} announced, withdrawn after {lasts} s", _announce(moments, ranks, output), WELL, play
    )


def taken(moments: random.Random, ranks: int, output: Path) -> Fault:
    """Announced, and then the node goes: its process is killed while all of them wait, or have not come to it."""
    kind, notice = moments.choice(_KINDS), round(moments.uniform(0.0, 3.0), 2)
    (announce,) = _announce(moments, ranks, output)
    power_cut = Order(announce.place, announce.occurrence, announce.ranks, "SIGKILL", delay_s=notice)

    def play(service: Service, announced: Path) -> None:
        service.answer = lambda: events(event(kind, 30)) if announced.exists() else events()

    return ServiceFault("events", f"{kind} announced, node gone after {notice} s", (announce, power_cut), None, play)


def broken(moments: random.Random) -> Fault:
    """A first answer that takes its time, errors, or nonsense: none may change anything."""
    how = moments.choice(["slow", "breaks off", *[f"status {code}" for code in (404, 410, 429, 500)], "nonsense"])
    nonsense = moments.choice(_NONSENSE)

    def play(service: Service, announced: Path) -> None:
        answers: dict[str, Answer] = {"slow": _slow, "breaks off": _break_off, "nonsense": lambda: nonsense}
        service.answer = answers.get(how, events)
        if how.startswith("status"):
            service.status = int(how.removeprefix("status "))

    return ServiceFault("events", f"events: {how}{f' {nonsense[:20]!r}' if how == 'nonsense' else ''}", (), WELL, play)


def _announce(moments: random.Random, ranks: int, output: Path) -> tuple[Order]:
    return (Order("step", moments.randint(1, 16), (ranks - 1,), command=("touch", str(output / "announced"))),)


def _for_a_while(announced: Path, lasts_s: float, what: dict[str, object]) -> bytes:
    shown = announced.exists() and time.time() - announced.stat().st_mtime < lasts_s
    return events(what) if shown else events()


def _slow() -> bytes:
    time.sleep(1.0)
    return events()


def _break_off() -> bytes:
    raise ConnectionError
