"""Without the extra `azure`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from azureml_strategy.cli import main
from azureml_strategy.jobs import price_for

_SIZE = "nc4as_t4_v3"
_WORKSPACE = ["--subscription", "s", "--resource-group", "g", "--workspace", "w"]
_RUN = ["resnet50_synthetic", f"cluster={_SIZE}"]


@pytest.fixture
def _no_azure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every import of Azure's ends as that of a package that is not there."""
    import_module("mlflow.tracking")  # which loads its plugins once, azureml-mlflow among them, for later tests too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = [name for name in sys.modules if name.startswith("azure.")]
    for name in {*loaded, "azure.ai.ml", "azure.core", "azure.core.exceptions", "azure.identity"}:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("_no_azure")
@pytest.mark.parametrize(
    "line",
    [
        ["submit", *_RUN],
        ["submit", *_RUN, "--dry-run"],
        ["study", *_RUN, "--nodes", "1"],
        ["study", "--runs", "a,b", "--store", "azureml"],
        ["jobs", "list"],
        ["jobs", "show", "job", *_WORKSPACE],
        ["jobs", "logs", "job"],
        ["jobs", "cancel", "job"],
        ["jobs", "download", "job"],
        ["model", "register", "m", "--job", "job"],
        ["cluster", "create", "--size", _SIZE],
        ["cluster", "create", "--size", _SIZE, "--dry-run"],
        ["cluster", "show"],
        ["cluster", "delete", "c"],
        ["data", "upload", ".", "--name", "d"],
        ["data", "register", "https://a.blob.core.windows.net/c/", "--name", "d", "--dry-run"],
        ["data", "attach", "d", "--account", "abc", "--container", "c"],
        ["data", "show"],
        ["environment", "build", "e"],
        ["workspace", "create", "w", "--region", "r"],
        ["workspace", "show"],
    ],
    ids=" ".join,
)
def test_every_verb_says_what_to_install(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("image.jpg").touch()  # something to upload
    assert main(line) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("azureml-strategy: What talks to Azure is not installed here")
    assert told.endswith("Type: pip install -c constraints.txt '.[azure]' in a clone of azureml-strategy")


@pytest.mark.usefixtures("_no_azure")
def test_a_price_says_so_too() -> None:
    with pytest.raises(ValueError, match=r"pip install .*\[azure\]'"):
        price_for(_SIZE, "westeurope", "dedicated")


def test_half_of_the_extra_is_not_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    assert main(["jobs", "list"]) == 2
    assert "Type: pip install -c constraints.txt '.[azure]'" in capsys.readouterr().err
