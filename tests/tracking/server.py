"""A real MLflow server for tests."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request
from pathlib import Path

from tests.preloaded import Forked


class Server:
    """A real `mlflow server` on the loopback interface, which can be stopped and started again."""

    def __init__(self, folder: Path, store: str) -> None:
        self._holder = socket.socket()  # nobody else gets the port, between a stop and a start either
        self._holder.bind(("127.0.0.1", 0))
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.port = self._holder.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder, self._store = folder, store
        self._log = folder / "server.log"

    def start(self) -> None:
        command = [str(Path(__file__).with_name("mlflow_server.py")), str(self._log), "--workers", "1"]
        command += ["--port", str(self.port), "--backend-store-uri", self._store]
        command += ["--default-artifact-root", str(self._folder / "artifacts")]
        self._log.touch()
        # MLflow would start seven more processes, for jobs that nobody gives it
        self._process = Forked(command, {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})
        while not self._is_up():
            assert self._process.poll() is None, self._process.stdout.read() + self._log.read_bytes()
            time.sleep(0.05)

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False
