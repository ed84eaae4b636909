"""A model of the hub: the processes of a node download it once. The hub is a server on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.tiny_model import save_tiny_model

# One interpreter imports for both processes. The tests' own server cannot: it has imported the library of the hub, and
# that reads the variables once.
FIND = """
import os
import huggingface_hub
from azureml_strategy.huggingface.sources import find_source
other = os.fork()
print(find_source("people/tiny").weight_files()[0], flush=True)
if other:
    assert os.waitpid(other, 0)[1] == 0
"""
COMMIT = "c0ffee" + "0" * 34


class Hub(ThreadingHTTPServer):
    """Serves one model, and counts the bytes of its weights that it sent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.sent = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        files = self.server.files
        name = self.path.rpartition("/")[2]
        if "/tree/" in self.path:
            tree = [{"type": "file", "path": each, "size": len(files[each]), "oid": "0" * 40} for each in files]
            self._answer(json.dumps(tree).encode(), {})
        elif self.path.startswith("/api/models/people/tiny"):
            listed = [{"rfilename": each} for each in files]
            self._answer(json.dumps({"id": "people/tiny", "sha": COMMIT, "siblings": listed}).encode(), {})
        elif "/resolve/" in self.path and name in files:
            content = files[name]
            etag = hashlib.sha256(content).hexdigest()
            self._answer(content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"})
            if self.command == "GET" and name.endswith(".safetensors"):
                self.server.sent += len(content)
        else:
            self.send_error(404)

    def _answer(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(save_tiny_model(tmp_path / "tiny")) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_two_processes_of_a_node_download_a_model_once(hub: Hub, tmp_path: Path) -> None:
    environ = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "cache")}
    environ.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", FIND]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    found = done.stdout.splitlines()
    assert len(found) == 2
    assert found[0] == found[1]
    weights = hub.files["model.safetensors"]
    assert Path(found[0]).read_bytes() == weights
    assert len(weights) <= hub.sent <= 1.05 * len(weights)
