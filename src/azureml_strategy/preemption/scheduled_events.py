"""What Azure has announced for this machine: Scheduled Events, asked for on a thread that cannot hurt training.

Sources: Azure's documentation of Scheduled Events for Linux VMs, and Microsoft's ai4s-jobq, which polls them inside
Azure ML jobs.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from azureml_strategy.cluster.environ import EVENTS_VARIABLE
from azureml_strategy.network.node import is_azure_vm

log = logging.getLogger(__name__)

URL = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"
# All that end a machine or its processes; a Freeze passes within seconds.
ENDING = ("Preempt", "Redeploy", "Reboot", "Terminate")
# The first question of a machine switches the service on, which may take two minutes.
_FIRST_TIMEOUT_SECONDS, _TIMEOUT_SECONDS = 150.0, 5.0
_AFTER_ERROR_SECONDS = 5.0
_MOST_BYTES, _MOST_TEXT = 1 << 20, 100
# Azure announces an event minutes ahead, a failing machine's days, and lists none long after it was due: what lies
# further off is no time of an event.
_MOST_AHEAD_SECONDS, _MOST_LATE_SECONDS = 30 * 86400.0, 86400.0


@dataclass(frozen=True)
class ScheduledEvent:
    """One announcement.

    Attributes:
        event_id: Azure's name of it.
        kind: `Preempt`, `Redeploy`, `Reboot`, `Terminate` or `Freeze`.
        not_before: earliest beginning in seconds since 1970; None once it has begun, or where the time that is given
            cannot be one: such an event counts as beginning when it is first seen.
        unread: the time that is given, where it cannot be one.
    """

    event_id: str
    kind: str
    not_before: float | None
    unread: str | None = None


class EventPoller:
    """Asks once in a while, on a thread, and remembers the event that should stop training.

    A service that is missing, slow, failing or talking nonsense changes nothing: what it said last holds, and it is
    asked again. The first nonsense is logged as a warning.

    Args:
        url: the service's address.
        notice_s: how long before its beginning an event counts, in seconds: of the quarter of an hour before a
            reboot, training uses the most.
        patience_s: how long after its announced beginning an event counts if this machine is still there, in seconds.
        interval_s: pause between two questions, in seconds. Azure recommends one.
    """

    def __init__(self, url: str, notice_s: float, patience_s: float, interval_s: float = 1.0) -> None:
        self._url = url
        self._notice_s = notice_s
        self._patience_s = patience_s
        self._interval_s = interval_s
        self._opener = build_opener(ProxyHandler({}))  # a proxy would answer for a machine of its own
        self._timeout_s = _FIRST_TIMEOUT_SECONDS
        self._warned = False
        self._due: dict[ScheduledEvent, float] = {}  # replaced as a whole: two threads use it
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduled-events", daemon=True)
        self._thread.start()

    @property
    def imminent(self) -> ScheduledEvent | None:
        """The event that is about to end this machine; None when there is none, or it has been withdrawn."""
        now = time.time()
        for event, due in self._due.items():
            if due - self._notice_s <= now <= due + self._patience_s:
                return event
        return None

    def close(self) -> None:
        """End the thread; one that waits for an answer is left behind."""
        self._closing.set()
        self._thread.join(timeout=0.2)

    def _run(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            try:
                self._remember(read_events(_ask(self._opener, self._url, self._timeout_s)))
            except (OSError, http.client.HTTPException):
                pause = max(self._interval_s, _AFTER_ERROR_SECONDS)
            except Exception as error:  # whatever it says, the next answer may be a Preempt
                self._warn(f"its answer cannot be read ({type(error).__name__}: {error})")
                pause = max(self._interval_s, _AFTER_ERROR_SECONDS)
            else:
                self._timeout_s = _TIMEOUT_SECONDS
                pause = self._interval_s

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("Scheduled Events at %s: %s. The service is asked again; this is said once.", self._url, what)

    def _remember(self, listed: tuple[ScheduledEvent, ...]) -> None:
        # One that begins is no new one: its time was announced. One first seen when it had begun is due now.
        now = time.time()
        announced = {event.event_id: due for event, due in self._due.items()}
        for event in listed:
            if event.unread is not None:
                self._warn(f"NotBefore={event.unread!r} of {event.kind} is no time; it counts as beginning now")
        self._due = {
            event: announced.get(event.event_id, now) if event.not_before is None else event.not_before
            for event in listed
            if event.kind in ENDING
        }


def events_url(url: str | None, environ: Mapping[str, str]) -> str | None:
    """Whom to ask: the address given, that of the environment, or Azure's on an Azure VM; None for nobody.

    Args:
        url: the address, or None to leave it to the environment.
        environ: the process's environment, see `EVENTS_VARIABLE`.
    """
    given = url or environ.get(EVENTS_VARIABLE)
    if given is not None:
        return None if given.lower() == "off" else given
    return URL if is_azure_vm() else None


def read_events(answer: bytes) -> tuple[ScheduledEvent, ...]:
    """The events of the service's answer; entries that are none are passed over.

    Raises:
        ValueError: it is no such answer.
    """
    document = json.loads(answer)
    entries = document.get("Events") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("no list of events")
    return tuple(_event(each) for each in entries if isinstance(each, dict) and isinstance(each.get("EventType"), str))


def _event(entry: Mapping[str, Any]) -> ScheduledEvent:
    kind, text = entry["EventType"], entry.get("NotBefore")
    not_before = _seconds(text)
    unread = str(text)[:_MOST_TEXT] if text and not_before is None else None  # empty: it has begun
    return ScheduledEvent(str(entry.get("EventId", kind)), kind, not_before, unread)


def _seconds(text: object) -> float | None:
    """Seconds since 1970 of `Mon, 19 Sep 2016 18:29:47 GMT`; None for anything that is no time of an event."""
    try:
        moment = parsedate_to_datetime(str(text))
        seconds = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError, TypeError):
        return None
    ahead = seconds - time.time()
    return seconds if -_MOST_LATE_SECONDS < ahead < _MOST_AHEAD_SECONDS else None


def _ask(opener: OpenerDirector, url: str, timeout_s: float) -> bytes:
    request = Request(url, headers={"Metadata": "true"})
    with opener.open(request, timeout=timeout_s) as response:
        return bytes(response.read(_MOST_BYTES))
