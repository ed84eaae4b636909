"""An HTTPS proxy on this machine that answers for every host itself.

Clients reach it by the variables with which a company's proxy is configured (HTTPS_PROXY, REQUESTS_CA_BUNDLE), so that
they run unchanged: real host names, TLS, sign-in, retries.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.jobs.azure_service.exchange import Reply, Request

Answer = Callable[[Request], "Reply | None"]


class Proxy:
    """The server, while it is used as a context; `url` is its address."""

    def __init__(self, answer: Answer, certificate: Path, key: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)

        class Handler(_Handler):
            answer_to = staticmethod(answer)
            tls = context

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up early, or does not trust the certificate, is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer_to: Answer
    tls: ssl.SSLContext
    _tunnel = ""  # the host that CONNECT named

    def do_CONNECT(self) -> None:
        self._tunnel = self.path.rpartition(":")[0]
        self.send_response(200)
        self.end_headers()
        self.connection = self.request = self.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb")
        self.close_connection = False

    def _serve(self) -> None:
        reply = self.answer_to(self._request())
        if reply is None:
            self.close_connection = True
            return
        content, headers = reply.encoded()
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_HEAD = _serve  # noqa: N815 - as above

    def _request(self) -> Request:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        headers = {name.lower(): value for name, value in self.headers.items()}
        host = self._tunnel or url.hostname or ""
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        return Request(self.command, host, unquote(url.path), query, headers, body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """The requests are recorded; nothing is printed."""
