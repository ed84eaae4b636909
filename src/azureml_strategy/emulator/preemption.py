"""Takes a node away as Azure does it: announced by a Scheduled Event, then without a word."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from azureml_strategy.emulator.processes import PowerCut


@dataclass(frozen=True)
class Preemption:
    """When a node goes.

    Attributes:
        after_s: from the job's start to the announcement, in seconds.
        notice_s: from the announcement to the end, in seconds. Azure gives a low-priority node at least 30.
    """

    after_s: float
    notice_s: float = 30.0


@contextmanager
def announced(preemption: Preemption, node: str) -> Iterator[tuple[dict[str, str], PowerCut]]:
    """A service of Scheduled Events on this machine's loopback, which announces the end of a node from now on.

    As on Azure only the node itself is told, and the service answers in the words of its documentation.

    Yields:
        Where to ask, by the node that may, and the end that is announced.
    """
    announced_at = time.time() + preemption.after_s
    event = {
        "EventId": "00000000-0000-0000-0000-000000000001",
        "EventType": "Preempt",
        "EventStatus": "Scheduled",
        "ResourceType": "VirtualMachine",
        "Resources": [node],
        "NotBefore": formatdate(announced_at + preemption.notice_s, usegmt=True),
        "EventSource": "Platform",
    }

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            events = [event] if time.time() >= announced_at else []
            answer = json.dumps({"DocumentIncarnation": len(events), "Events": events}).encode()
            self.send_response(200 if self.headers.get("Metadata") == "true" else 400)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - http.server's name
            """One line a second is for nobody."""

    power_cut = PowerCut(node, time.monotonic() + preemption.after_s + preemption.notice_s)
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        try:
            yield {node: f"http://127.0.0.1:{server.server_port}/metadata/scheduledevents"}, power_cut
        finally:
            server.shutdown()
