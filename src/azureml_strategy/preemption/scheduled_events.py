"""Polls Azure's Scheduled Events for this machine, on a background thread that cannot disturb training.

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
from urllib.request import ProxyHandler, Request, build_opener

from azureml_strategy.cluster.environ import EVENTS_VARIABLE
from azureml_strategy.network.node import is_azure_vm

log = logging.getLogger(__name__)

URL = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"
# The events that end a machine or its processes. A Freeze is left out: it passes within seconds.
ENDING = ("Preempt", "Redeploy", "Reboot", "Terminate")
# The first request of a machine switches the service on, which may take two minutes.
_FIRST_TIMEOUT_SECONDS, _TIMEOUT_SECONDS = 150.0, 5.0
_AFTER_ERROR_SECONDS = 5.0
_MOST_BYTES, _MOST_TEXT = 1 << 20, 100
# Azure announces an event minutes ahead, or days ahead for a failing machine, and does not list one long after it was
# due. A time outside these limits cannot be an event's.
_MOST_AHEAD_SECONDS, _MOST_LATE_SECONDS = 30 * 86400.0, 86400.0


@dataclass(frozen=True)
class ScheduledEvent:
    """One announced event.

    Attributes:
        event_id: Azure's.
        kind: `Preempt`, `Redeploy`, `Reboot`, `Terminate` or `Freeze`.
        not_before: earliest start in seconds since 1970. None once the event has started, or if Azure's time for it is
            invalid. Such an event counts as starting when it is first seen, unless its time was known before.
        unread: Azure's time for the event, if it is invalid.
    """

    event_id: str
    kind: str
    not_before: float | None
    unread: str | None = None


class EventPoller:
    """Polls the service on a background thread, and remembers the events that should stop training.

    If the service is missing, slow, failing or sends invalid answers, its last valid answer holds and polling goes on.
    The first invalid answer is logged as a warning.

    An event is imminent from `notice_s` before its start until `patience_s` after it, if this machine still exists.
    Azure announces a reboot a quarter of an hour ahead, and training uses most of this time. Azure recommends one
    second between two requests.
    """

    def __init__(self, url: str, notice_s: float, patience_s: float, interval_s: float = 1.0) -> None:
        self._url = url
        self._notice_s = notice_s
        self._patience_s = patience_s
        self._interval_s = interval_s
        self._opener = build_opener(ProxyHandler({}))  # a proxy would answer for its own machine
        self._timeout_s = _FIRST_TIMEOUT_SECONDS
        self._warned = False
        self._due: dict[ScheduledEvent, float] = {}  # two threads use it, so it is only replaced as a whole
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduled-events", daemon=True)
        self._thread.start()

    @property
    def imminent(self) -> ScheduledEvent | None:
        """The event that is about to end this machine; None if there is none or it has been withdrawn."""
        now = time.time()
        for event, due in self._due.items():
            if due - self._notice_s <= now <= due + self._patience_s:
                return event
        return None

    def close(self) -> None:
        """End the thread. If it waits for an answer, leave it behind."""
        self._closing.set()
        self._thread.join(timeout=0.2)

    def _run(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            pause = max(self._interval_s, _AFTER_ERROR_SECONDS)
            try:
                request = Request(self._url, headers={"Metadata": "true"})
                with self._opener.open(request, timeout=self._timeout_s) as response:
                    answer = bytes(response.read(_MOST_BYTES))
                self._remember(read_events(answer))
                self._timeout_s, pause = _TIMEOUT_SECONDS, self._interval_s
            except (OSError, http.client.HTTPException):
                continue
            except Exception as error:  # whatever the error, the next answer may hold a Preempt
                self._warn(f"its answer cannot be read ({type(error).__name__}: {error})")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("Scheduled Events at %s: %s. The service is asked again; this is said once.", self._url, what)

    def _remember(self, listed: tuple[ScheduledEvent, ...]) -> None:
        # An event that has started keeps the time announced before. One that is first seen after its start is due now.
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
    """Return the address to poll: the given one, that in `EVENTS_VARIABLE`, or Azure's own on an Azure VM.

    None means no polling, as for the address `off`.
    """
    given = url or environ.get(EVENTS_VARIABLE)
    if given is not None:
        return None if given.lower() == "off" else given
    return URL if is_azure_vm() else None


def read_events(answer: bytes) -> tuple[ScheduledEvent, ...]:
    """Return the events in the service's answer. Entries that are not events are skipped.

    Raises:
        ValueError: the answer is not JSON with a list of events.
    """
    document = json.loads(answer)
    entries = document.get("Events") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("no list of events")
    events = []
    for entry in entries:
        kind = entry.get("EventType") if isinstance(entry, dict) else None
        if isinstance(kind, str):
            text = entry.get("NotBefore")
            not_before = _parse_time(text)
            unread = str(text)[:_MOST_TEXT] if text and not_before is None else None  # empty: the event has started
            events.append(ScheduledEvent(str(entry.get("EventId", kind)), kind, not_before, unread))
    return tuple(events)


def _parse_time(text: object) -> float | None:
    """Parse `Mon, 19 Sep 2016 18:29:47 GMT` to seconds since 1970; None for any text that is no time of an event."""
    try:
        moment = parsedate_to_datetime(str(text))
        seconds = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError, TypeError):
        return None
    ahead = seconds - time.time()
    return seconds if -_MOST_LATE_SECONDS < ahead < _MOST_AHEAD_SECONDS else None
