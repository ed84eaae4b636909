"""The service of Scheduled Events as documented, and everything that it may say or do instead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime

import pytest
from tests.checkpoint.scheduled_events_service import Service, event, events, serving

from azureml_strategy.preemption import scheduled_events
from azureml_strategy.preemption.scheduled_events import URL, EventPoller, events_url, read_events

# From Azure's page "Scheduled Events for Linux VMs".
DOCUMENTED = b"""{"DocumentIncarnation": 1, "Events": [{"EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    "EventStatus": "Scheduled", "EventType": "Freeze", "ResourceType": "VirtualMachine", "Resources": ["WestNO_0",
    "WestNO_1"], "NotBefore": "Mon, 11 Apr 2022 22:26:58 GMT", "Description": "Virtual machine is being paused because
    of a memory-preserving Live Migration operation.", "EventSource": "Platform", "DurationInSeconds": 5}]}"""
NONSENSE = [
    b"",
    b"<html>log in first</html>",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b'{"Events": {}}',
    b'{"Events": null}',
    b"[" * 100_000,
    b"{" * 10,
]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(scheduled_events, "_AFTER_ERROR_SECONDS", 0.02)
    with serving() as service:
        yield service


@pytest.fixture
def poller(service: Service) -> Iterator[EventPoller]:
    poller = EventPoller(service.url, notice_s=60, patience_s=120, interval_s=0.02)
    yield poller
    poller.close()


def comes(condition: Callable[[], bool]) -> bool:
    """Whether it comes to pass, within many looks: a machine that stands still costs one look."""
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def asked_again(service: Service, times: int = 3) -> bool:
    before = service.asked
    return comes(lambda: service.asked >= before + times)


def test_the_documented_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = read_events(DOCUMENTED.replace(b"\n", b" "))
    assert (found.event_id, found.kind) == ("C7061BAC-AFDC-4513-B24B-AA5F13A16123", "Freeze")
    assert found.not_before is None, "it is years late"
    at = parsedate_to_datetime("Mon, 11 Apr 2022 22:26:58 GMT").timestamp()
    assert at == 1649716018
    monkeypatch.setattr(time, "time", lambda: at - 60)
    assert read_events(DOCUMENTED.replace(b"\n", b" "))[0].not_before == at


@pytest.mark.parametrize("answer", NONSENSE)
def test_what_is_no_answer(answer: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        read_events(answer)


def test_entries_that_are_none_are_passed_over() -> None:
    odd = b'{"Events": [1, null, "Preempt", {}, {"EventType": 3}, {"EventType": "Preempt", "NotBefore": [1]}]}'
    (found,) = read_events(odd)
    assert (found.kind, found.event_id, found.not_before) == ("Preempt", "Preempt", None)


def test_the_request_is_the_documented_one(
    service: Service, poller: EventPoller, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked_again(service)
    assert service.headers["Metadata"] == "true"
    assert URL == "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"


def test_no_proxy_is_asked(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1/")
    poller = EventPoller(service.url, 60, 120, 0.02)
    assert asked_again(service)
    poller.close()


@pytest.mark.parametrize("kind", ["Preempt", "Redeploy", "Reboot", "Terminate"])
def test_an_event_counts_until_it_is_withdrawn(service: Service, poller: EventPoller, kind: str) -> None:
    assert poller.imminent is None
    service.answer = lambda: events(event(kind))
    assert comes(lambda: poller.imminent is not None)
    assert poller.imminent is not None
    assert poller.imminent.kind == kind
    service.answer = events
    assert comes(lambda: poller.imminent is None)


def test_a_freeze_is_none_of_ours(service: Service, poller: EventPoller) -> None:
    service.answer = lambda: events(event("Freeze"))
    assert asked_again(service)
    assert poller.imminent is None


def test_a_distant_reboot_can_wait(service: Service, poller: EventPoller) -> None:
    service.answer = lambda: events(event("Reboot", 900))
    assert asked_again(service)
    assert poller.imminent is None


def test_an_event_that_never_comes_is_forgotten(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays listed, but its time and our patience are over."""
    service.answer = lambda: events(event(begins_in_s=None))
    poller = EventPoller(service.url, notice_s=60, patience_s=600, interval_s=0.02)
    assert comes(lambda: poller.imminent is not None)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 601)
    assert poller.imminent is None
    assert asked_again(service)
    assert poller.imminent is None
    poller.close()


def test_beginning_is_no_new_event(service: Service) -> None:
    scheduled, begun = event(begins_in_s=-2), event(begins_in_s=None)
    service.answer = lambda: events(scheduled)
    poller = EventPoller(service.url, notice_s=60, patience_s=1, interval_s=0.02)
    assert asked_again(service)
    service.answer = lambda: events(begun)
    assert asked_again(service)
    assert poller.imminent is None
    poller.close()


@pytest.mark.parametrize("answer", NONSENSE)
def test_nonsense_changes_nothing(
    service: Service, poller: EventPoller, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    service.answer = lambda: events(event())
    assert comes(lambda: poller.imminent is not None)
    service.answer = lambda: answer
    assert asked_again(service)
    assert poller.imminent is not None
    service.answer = events
    assert comes(lambda: poller.imminent is None)


# Strange, unreadable, and out of any range of C or of Python.
NO_TIMES = [
    "Mon, 11 Apr 0000 22:26:58 GMT",
    "Mon, 11 Apr 0001 22:26:58 GMT",
    "Mon, 11 Apr 9999 22:26:58 GMT",
    "Mon, 11 Apr 99999 22:26:58 GMT",
    f"Mon, 11 Apr {10**30} 22:26:58 GMT",
    "Mon, 11 Apr 2022 22:26:58 +99999999999999999999",
    "Mon, 99 Xxx 2022 99:99:99 GMT",
    "soon",
    True,
    [1],
    {"": 0},
    -1e308,
]


@pytest.mark.parametrize("kind", ["Preempt", "Freeze"])
def test_a_time_that_is_none_ends_nothing_and_hides_no_event(
    service: Service, poller: EventPoller, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number, not_before in enumerate(NO_TIMES):
        strange = event(kind, event_id=str(number)) | {"NotBefore": not_before}
        service.answer = lambda strange=strange: events(strange)  # type: ignore[misc]
        assert asked_again(service), not_before
        found = poller.imminent
        assert (found is not None and found.event_id == str(number)) if kind == "Preempt" else found is None
    service.answer = lambda: events(event("Preempt", event_id="next"))
    assert comes(lambda: poller.imminent is not None and poller.imminent.event_id == "next")
    (record,) = caplog.records
    assert "NotBefore='Mon, 11 Apr 0000 22:26:58 GMT'" in record.message


@pytest.mark.parametrize("status", [400, 404, 410, 429, 500, 503])
def test_errors_of_the_service_are_outlived(service: Service, poller: EventPoller, status: int) -> None:
    service.status = status
    assert asked_again(service)
    service.status = 200
    service.answer = lambda: events(event())
    assert comes(lambda: poller.imminent is not None)


def test_a_connection_that_breaks(service: Service, poller: EventPoller) -> None:
    def breaks() -> bytes:
        raise ConnectionAbortedError

    service.answer = breaks
    assert asked_again(service)
    service.answer = lambda: events(event())
    assert comes(lambda: poller.imminent is not None)


def test_a_slow_first_answer_is_waited_for(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than any later question may take."""
    monkeypatch.setattr(scheduled_events, "_TIMEOUT_SECONDS", 0.2)

    def slow() -> bytes:
        time.sleep(0.6)
        return events(event())

    service.answer = slow
    poller = EventPoller(service.url, 60, 120, 0.02)
    assert comes(lambda: poller.imminent is not None)
    assert service.asked >= 1
    before = service.asked
    service.answer = events
    assert comes(lambda: poller.imminent is None and service.asked > before)
    poller.close()


def test_closing_waits_for_no_answer(service: Service) -> None:
    answers = threading.Event()

    def hangs() -> bytes:
        answers.wait()
        return events()

    service.answer = hangs
    poller = EventPoller(service.url, 60, 120, 0.02)
    assert comes(lambda: service.asked == 1)
    poller.close()
    answers.set()


def test_nobody_there() -> None:
    poller = EventPoller("http://127.0.0.1:1/", 60, 120, 0.02)
    time.sleep(0.1)
    assert poller.imminent is None
    poller.close()


@pytest.mark.parametrize(
    ("given", "variable", "azure", "expected"),
    [
        (None, None, False, None),
        (None, None, True, URL),
        ("http://here", None, False, "http://here"),
        ("http://here", "http://there", True, "http://here"),
        (None, "http://there", True, "http://there"),
        (None, "off", True, None),
        ("off", "http://there", True, None),
    ],
)
def test_who_is_asked(
    monkeypatch: pytest.MonkeyPatch, given: str | None, variable: str | None, azure: bool, expected: str | None
) -> None:
    monkeypatch.setattr(scheduled_events, "is_azure_vm", lambda: azure)
    environ = {} if variable is None else {"AZUREML_STRATEGY_SCHEDULED_EVENTS": variable}
    assert events_url(given, environ) == expected
