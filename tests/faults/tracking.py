"""An MLflow server that is away, slow, or too busy for a while: a real one, behind a proxy that plays it."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.faults.fault import WELL, Attempt, Fault
from tests.faults.orders import Order

# The client's own patience, shorter than by default, so that an outage of seconds outlasts it.
CLIENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
_WRITE = "/runs/log-batch"
FOR_GOOD = 1e9


@dataclass(frozen=True)
class Trouble:
    """What the proxy does instead of passing requests on.

    Attributes:
        kind: `down`, `slow`, `breaks off`, `answer lost`, `refuses`, or a status such as `429`.
        writes: how many batches of metrics come through before.
        lasts_s: for how long, in seconds from then on.
    """

    kind: str
    writes: int
    lasts_s: float


class Proxy:
    """Passes requests on to a server, but for the time of the trouble."""

    def __init__(self, server: str, trouble: Trouble) -> None:
        self.met = False
        self.retry_after = "0"
        self._server = urlsplit(server).netloc
        self._trouble = trouble
        self._writes = 0
        self._since: float | None = None
        self._lock = threading.Lock()
        self._listener = self._listen(0)
        self._port = int(self._listener.server_address[1])
        self.url = f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    def trouble(self, path: str, body: bytes) -> str:
        """What becomes of this request; nothing special where that is empty."""
        with self._lock:
            if self._since is None and self._writes >= self._trouble.writes:
                self._since = time.monotonic()
            self._writes += path.endswith(_WRITE)
            if self._since is None or time.monotonic() - self._since > self._trouble.lasts_s:
                return ""
            self.met = True
            return self._trouble.kind

    def go_down(self) -> None:
        """Refuse connections from now on, and listen again later."""
        listener = self._listener
        threading.Thread(target=self._down, args=(listener,), daemon=True).start()

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        link = http.client.HTTPConnection(self._server, timeout=30)
        link.request(method, path, body, headers)
        answer = link.getresponse()
        return answer.status, answer.read()

    def _down(self, listener: ThreadingHTTPServer) -> None:
        listener.shutdown()
        listener.server_close()
        if self._trouble.lasts_s < FOR_GOOD:
            time.sleep(self._trouble.lasts_s)
            self._listener = self._listen(self._port)

    def _listen(self, port: int) -> ThreadingHTTPServer:
        listener = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        listener.daemon_threads = False  # a job starts again later than the last request of its last attempt arrives
        threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        return listener


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815 - http.server's names

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            trouble = proxy.trouble(urlsplit(self.path).path, body)
            if trouble in ("down", "breaks off"):
                if trouble == "down":
                    proxy.go_down()
                return  # without a word: the client sees the end of the connection
            if trouble == "slow":
                time.sleep(1.0)
            status, content = int(trouble) if trouble.isdigit() else 0, b"{}"
            if trouble == "refuses":
                status, content = 400, b'{"error_code": "INVALID_PARAMETER_VALUE", "message": "no, says the proxy"}'
            if not status:
                headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
                status, content = proxy.pass_on(self.command, self.path, headers, body)
                if trouble == "answer lost":
                    return
            self.send_response(status)
            if status in (429, 503):
                self.send_header("Retry-After", proxy.retry_after)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


@dataclass(frozen=True)
class TrackingFault(Fault):
    """The job's MLflow server has trouble.

    Attributes:
        trouble: what kind, and when.
    """

    trouble: Trouble = Trouble("slow", 0, 0)

    @contextmanager
    def around(self, attempt: Attempt) -> Iterator[None]:
        proxy = Proxy(attempt.environ["MLFLOW_TRACKING_URI"], self.trouble)
        attempt.environ["MLFLOW_TRACKING_URI"] = proxy.url
        try:
            yield
        finally:
            proxy.close()
        if proxy.met and not self.orders:
            attempt.met.append(self)


def outage(moments: random.Random) -> Fault:
    """For some seconds, from some batch of metrics on."""
    trouble = Trouble(_kind(moments), moments.randint(0, 8), round(moments.uniform(0.3, 3.0), 2))
    if trouble.writes == 0:  # the run is opened then, which the client alone must bring about
        trouble = Trouble(trouble.kind, 0, round(moments.uniform(0.1, 1.0), 2))
    return TrackingFault(
        "tracking", f"MLflow {trouble.kind} after {trouble.writes} writes, {trouble.lasts_s} s", (), WELL, trouble
    )


def outage_and_end(moments: random.Random) -> Fault:
    """The server does not come back, and the process that has what is not written is killed."""
    trouble = Trouble(_kind(moments), moments.randint(1, 6), FOR_GOOD)
    death = Order("step", moments.randint(4, 24), (0,), "SIGKILL")
    return TrackingFault("tracking", f"MLflow {trouble.kind} for good, then {death.text()}", (death,), None, trouble)


def _kind(moments: random.Random) -> str:
    return moments.choice(["down", "slow", "breaks off", "429", "500", "503"])
