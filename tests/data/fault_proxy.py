"""Stands between a reader and Azurite, and does to its answers what networks and busy services do.

The account key's signature covers the path and not the host, so that Azurite accepts what was signed for the proxy.
Azurite takes tokens of Entra ID by HTTPS only: the proxy accepts any, and signs the request itself.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.data.azurite import ACCOUNT, Azurite


@dataclass
class Answer:
    """What the proxy sends back.

    Attributes:
        status, headers, body: of the answer. Its Content-Length is the body's.
        sent: so many bytes of the body are sent before the connection is closed; all of them by default.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    sent: int | None = None


@dataclass(frozen=True)
class Seen:
    """A request that came; `at` is of `time.monotonic`."""

    method: str
    path: str
    headers: dict[str, str] = field(repr=False)
    at: float = field(repr=False)


Change = Callable[[Answer], "Answer | None"]


@dataclass
class _Fault:
    pattern: str
    change: Change
    times: float
    passes: int


class FaultProxy:
    """A proxy for one Azurite; use it as a context.

    Attributes:
        environment: variables with which `open_storage("az://...", environment)` reads through it.
        seen: what came, in order.
        most_at_once: the largest number of requests that were under way together.
    """

    def __init__(self, azurite: Azurite) -> None:
        self._target, self._signature = azurite.port, azurite.signature()
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()
        self._under_way = 0
        self.seen: list[Seen] = []
        self.most_at_once = 0
        self._server = self._listen(0)
        self.port = self._server.server_address[1]
        self.environment = azurite.environment | {"AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{self.port}/{ACCOUNT}"}

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def change(self, change: Change, pattern: str = "", times: float = 1, passes: int = 0) -> None:
        """Change answers of requests whose path matches.

        Args:
            change: gets Azurite's answer, and returns what is sent in its place; None closes the connection.
            pattern: a regular expression, searched in path and query.
            times: how many answers; `math.inf` for all.
            passes: so many answers before them are left as they are.
        """
        self._faults.append(_Fault(pattern, change, times, passes))

    def fail(self, status: int, code: str = "", pattern: str = "", times: float = 1, **headers: str) -> None:
        """Answer with an error; `retry_after="1"` becomes a header."""
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>sig=SECRET</Message></Error>".encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.change(lambda _: Answer(status, named, body), pattern, times)

    def drop(self, sent: int, pattern: str = "", times: float = 1) -> None:
        """Close the connection after so many bytes of the body; before the answer if it is negative."""

        def dropped(answer: Answer) -> Answer | None:
            return None if sent < 0 else Answer(answer.status, answer.headers, answer.body, sent)

        self.change(dropped, pattern, times)

    def resize(self, by: int, pattern: str = "", times: float = 1) -> None:
        """Cut so many bytes off the body, or append some; its Content-Length is true, its Content-Range is not."""

        def resized(answer: Answer) -> Answer:
            body = answer.body + b"+" * by if by > 0 else answer.body[:by]
            return Answer(answer.status, answer.headers, body)

        self.change(resized, pattern, times)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse connections meanwhile, also those that are open."""
        self._stop()
        try:
            yield
        finally:
            self._server = self._listen(self.port)

    def _listen(self, port: int) -> _Server:
        proxy = self

        class Handler(_Handler):
            answer_to = staticmethod(proxy._answer)

        server = _Server(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()

    def _answer(self, seen: Seen) -> Answer | None:
        with self._lock:
            self.seen.append(seen)
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
            change = self._due(seen)
        try:
            answer = self._forward(seen)
            return answer if change is None else change(answer)
        finally:
            with self._lock:
                self._under_way -= 1

    def _due(self, seen: Seen) -> Change | None:
        for fault in self._faults:
            if fault.times <= 0 or not re.search(fault.pattern, seen.path):
                continue
            if fault.passes:
                fault.passes -= 1
                continue
            fault.times -= 1
            return fault.change
        return None

    def _signed(self, seen: Seen) -> tuple[str, None, dict[str, str]]:
        """Path, body and headers for Azurite."""
        if not seen.headers.get("authorization", "").startswith("Bearer "):
            return seen.path, None, seen.headers
        headers = {name: value for name, value in seen.headers.items() if name != "authorization"}
        return f"{seen.path}{'&' if '?' in seen.path else '?'}{self._signature}", None, headers

    def _forward(self, seen: Seen) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._target)
        try:
            connection.request(seen.method, *self._signed(seen))
            answer = connection.getresponse()
            dropped = ("content-length", "transfer-encoding", "connection", "keep-alive")
            headers = {name.title(): value for name, value in answer.getheaders() if name.lower() not in dropped}
            return Answer(answer.status, headers, answer.read())
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close, allow_reuse_address = True, False, True
    request_queue_size = 256

    def __init__(self, *arguments: object) -> None:
        self.open: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: socket.socket, client_address: object) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        for each in list(self.open):
            self.shutdown_request(each)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up: that is what is tested."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer_to: Callable[[Seen], Answer | None]

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.answer_to(Seen(self.command, self.path, headers, time.monotonic()))
        if answer is None:
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: answer.sent])
        if answer.sent is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815 - as the base class calls it

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """The requests are recorded; nothing is printed."""
