"""A real MLflow server for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil


class Server:
    """A real `mlflow server` on the loopback interface, which can be stopped and started again."""

    def __init__(self, folder: Path, store: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder, self._store = folder, store

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(self.port)]
        command += ["--backend-store-uri", self._store, "--default-artifact-root", str(self._folder / "artifacts")]
        # MLflow would start seven more processes, for jobs that nobody gives it
        environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "server.log").open("w") as output:
            self._process = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
        while not self._is_up():
            assert self._process.poll() is None, (self._folder / "server.log").read_text()

    def stop(self) -> None:
        processes = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes[1:], timeout=10)
        self._process.wait()

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False
