"""`jobs upload-metrics` sends metrics, files and a token only to a store that the user or the environment names."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from azureml_strategy.cli import main
from azureml_strategy.jobs.listing import store_address
from azureml_strategy.tracking.offline_queue import OfflineQueue, _refuse_files_elsewhere
from azureml_strategy.tracking.run import RunRequest, describe_store

WORKSPACE = "/mlflow/v1.0/subscriptions/s/resourceGroups/g/providers/p/workspaces/w"
MINE = f"azureml://westeurope.api.azureml.ms{WORKSPACE}"


def client() -> Any:
    return SimpleNamespace(
        workspace_name="w",
        workspaces=SimpleNamespace(get=lambda _: SimpleNamespace(mlflow_tracking_uri=MINE)),
    )


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where MLflow keeps passwords
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "store",
    [
        "http://evil.example/",
        "https://evil.example",
        "http://127.0.0.1.evil.example:5000",
        "http://127.0.0.1@evil.example",
        f"azureml://evil.example{WORKSPACE}x",
        "azureml://evil.example/",
        "file://evil.example/share",
        "databricks://evil",
        "postgresql://evil.example/db",
        "",
    ],
)
def test_no_other_host_is_taken_from_a_file(store: str) -> None:
    with pytest.raises(ValueError, match="--tracking-uri URI"):
        store_address(store, client)


@pytest.mark.parametrize("version", ["v1.0", "v2.0"])  # a job's address may tell another than the workspace's
def test_the_file_of_a_job_names_its_workspace_without_its_subscription(version: str) -> None:
    path = "subscriptions/11111111-2222-3333-4444-555555555555/resourceGroups/g/providers/p/workspaces/w"
    mine = f"azureml://westeurope.api.azureml.ms/mlflow/v1.0/{path}"
    found = SimpleNamespace(get=lambda _: SimpleNamespace(mlflow_tracking_uri=mine))
    workspace: Any = SimpleNamespace(workspace_name="w", workspaces=found)
    written = describe_store(f"azureml://westeurope.api.azureml.ms/mlflow/{version}/{path}?")
    assert "11111111" not in written
    assert store_address(written, lambda: workspace) == mine
    with pytest.raises(ValueError, match="--tracking-uri URI"):
        store_address(written.replace("workspaces/w", "workspaces/other"), lambda: workspace)


def test_what_is_the_users_own_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_address(f"azureml://evil.example{WORKSPACE}", client) == MINE  # the workspace's own host
    for here in ("sqlite:////tmp/mlflow.db", "http://127.0.0.1:5000", "http://localhost:5000"):
        assert store_address(here, client) == here
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://store.example:5000")
    assert store_address("http://store.example:5000", client) == "http://store.example:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    with pytest.raises(ValueError, match="--tracking-uri URI"):
        store_address("http://127.0.0.1:5000", client)


@contextmanager
def serving(heard: list[str], redirect: str = "") -> Iterator[str]:
    """A server that notes the token of each request, and may lead on to another."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(str(self.headers.get("Authorization")))
            self.send_response(307 if redirect else 404)
            if redirect:
                self.send_header("Location", redirect + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def spool(folder: Path, store: str, *lines: Any) -> Path:
    made = OfflineQueue.create(folder, RunRequest(store, run_id="0" * 32))
    made.close()
    with made.path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return made.path


def test_a_token_goes_to_no_other_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    theirs: list[str] = []
    mine: list[str] = []
    with serving(theirs) as evil, serving(mine, redirect=evil.replace("127.0.0.1", "localhost")) as own:
        file = spool(tmp_path, evil, {"metrics": "loss", "value": 1.0, "step": 0, "timestamp_ms": 1})
        assert main(["jobs", "upload-metrics", str(tmp_path)]) == 1
        assert "--tracking-uri URI" in capsys.readouterr().out
        assert theirs == []
        monkeypatch.setenv("MLFLOW_TRACKING_URI", own)
        file.write_text(file.read_text().replace(evil, own))
        assert main(["jobs", "upload-metrics", str(tmp_path)]) == 1
    assert set(mine) == {"Bearer secret"}
    assert set(theirs) <= {"None"}, "a redirect carries no token"
    assert file.exists()


def test_files_of_the_machine_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "key").write_text("private")
    folder = tmp_path / "run"
    heard: list[str] = []
    with serving(heard) as own:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", own)
        (folder / "sub").mkdir(parents=True)
        monkeypatch.chdir(folder)
        for place in (tmp_path / "key", folder / ".." / "key", folder / "link"):
            (folder / "link").symlink_to(tmp_path / "key") if place.name == "link" else None
            file = spool(folder / "sub", own, {"artifacts": "a/key", "value": str(place)})
            assert main(["jobs", "upload-metrics", str(folder / "sub")]) == 1
            assert f"it would send {str(place)!r}" in capsys.readouterr().out
            file.unlink()
    assert heard == []


def test_a_file_of_the_node_that_wrote_the_lines_keeps_no_metric_back(tmp_path: Path) -> None:
    made = spool(tmp_path, "sqlite:////none", {"artifacts": "a/trace", "value": "/mnt/azureml/cr/j/none/trace.json"})
    _refuse_files_elsewhere(OfflineQueue(made))


@pytest.mark.parametrize(
    "line",
    [
        {"metrics": "loss", "value": "x", "step": 0, "timestamp_ms": 1},
        {"metrics": "loss"},
        {"params": "lr"},
        {"run_id": 5},
        {"end": "status", "value": "FINISHED"},
        [1],
        {"metrics": "loss", "value": 10**400, "step": 0, "timestamp_ms": 1},
    ],
    ids=str,
)
def test_a_damaged_line_is_one_sentence(
    line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    spool(tmp_path, "http://127.0.0.1:9", line)
    assert main(["jobs", "upload-metrics", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out.startswith(str(tmp_path))
    assert "Traceback" not in told.out + told.err
