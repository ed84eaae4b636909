from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tests.tracking.server import Server

from azureml_strategy.tracking.run import locate

AZURE = (
    "azureml://westeurope.api.azureml.ms/mlflow/v1.0/subscriptions/11111111-2222-3333-4444-555555555555"
    "/resourceGroups/my-group/providers/Microsoft.MachineLearningServices/workspaces/my-workspace"
)


@pytest.mark.parametrize(
    ("uri", "open_with"),
    [
        ("http://host:5000/", "http://host:5000/#/experiments/7/runs/abc"),
        ("azureml://elsewhere", "az ml job show --name abc --web"),
        (AZURE, "az ml job show --name abc --resource-group my-group --workspace-name my-workspace --web"),
        ("sqlite:////data/it's mine.db", "mlflow ui --backend-store-uri 'sqlite:////data/it'\"'\"'s mine.db'"),
    ],
)
def test_how_to_open(uri: str, open_with: str) -> None:
    assert locate(uri, "e", "7", "abc", "n").open_with == open_with


@pytest.mark.parametrize(
    ("uri", "lines"),
    [
        ("http://host:5000/", ["Open the run: http://host:5000/#/experiments/7/runs/abc"]),
        ("azureml://elsewhere", ["Open the run: az ml job show --name abc --web"]),
        (
            "sqlite:////m.db",
            [
                "Open the run: mlflow ui --backend-store-uri sqlite:////m.db",
                "Then its page is http://127.0.0.1:5000/#/experiments/7/runs/abc",
            ],
        ),
    ],
)
def test_what_the_console_says(uri: str, lines: list[str]) -> None:
    assert locate(uri, "e", "7", "abc", "n").how_to_open() == lines


def test_the_address_is_that_of_the_run_s_page(server: Server, client: MlflowClient) -> None:
    """The part after `#` is read by MLflow's program in the browser, which says what it takes."""
    run_id = client.create_run("0").info.run_id
    address = locate(server.uri, "Default", "0", run_id, "n").address
    assert address == f"{server.uri}/#/experiments/0/runs/{run_id}"
    page = _get(address)  # as a browser, without the part after `#`
    (script,) = re.findall(r'src="([^"]+/main\.[^"]+\.js)"', page)
    program = _get(f"{server.uri}/{script}")
    assert '"/experiments/:experimentId/runs/:runUuid"' in program
    assert "createHashRouter" in program


def _get(address: str) -> str:
    with urllib.request.urlopen(address) as answer:
        return str(answer.read().decode())


def test_a_relative_file_is_named_from_the_root(tmp_path: Path) -> None:
    location = locate("sqlite:///mlflow.db", "e", "7", "abc", "n")  # tests run in tmp_path
    assert location.store == f"sqlite:///{tmp_path}/mlflow.db"


def test_no_credentials() -> None:
    location = locate("https://me:secret@host", "e", "7", "abc", "n")
    assert "secret" not in repr(location)
    assert "555555555555" not in repr(locate(AZURE, "e", "7", "abc", "n"))
