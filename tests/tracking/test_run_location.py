from __future__ import annotations

from pathlib import Path

import pytest

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


def test_a_relative_file_is_named_from_the_root(tmp_path: Path) -> None:
    location = locate("sqlite:///mlflow.db", "e", "7", "abc", "n")  # tests run in tmp_path
    assert location.store == f"sqlite:///{tmp_path}/mlflow.db"


def test_no_credentials() -> None:
    location = locate("https://me:secret@host", "e", "7", "abc", "n")
    assert "secret" not in repr(location)
    assert "555555555555" not in repr(locate(AZURE, "e", "7", "abc", "n"))
