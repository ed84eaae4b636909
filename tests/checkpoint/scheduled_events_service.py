"""Azure's service of Scheduled Events, played by a real server that a test tells what to answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[], bytes]


class Service:
    """What the service answers, and how often it was asked.

    `answer` may raise: the connection breaks then.
    """

    def __init__(self) -> None:
        self.answer: Answer = lambda: events()
        self.status = 200
        self.asked = 0
        self.headers: dict[str, str] = {}
        self.url = ""


def events(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"DocumentIncarnation": 1, "Events": list(entries)}).encode()


def event(kind: str = "Preempt", begins_in_s: float | None = 30, event_id: str = "A") -> dict[str, Any]:
    """One event as documented; None for one that has begun."""
    not_before = "" if begins_in_s is None else formatdate(time.time() + begins_in_s, usegmt=True)
    status = "Started" if begins_in_s is None else "Scheduled"
    return {
        "EventId": event_id,
        "EventType": kind,
        "EventStatus": status,
        "ResourceType": "VirtualMachine",
        "Resources": ["vm_0"],
        "NotBefore": not_before,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


@contextmanager
def serving() -> Iterator[Service]:
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            service.asked += 1
            service.headers = dict(self.headers)
            content = service.answer()
            self.send_response(service.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads, block_on_close = True, False

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        service.url = f"http://127.0.0.1:{server.server_port}/metadata/scheduledevents"
        try:
            yield service
        finally:
            server.shutdown()
