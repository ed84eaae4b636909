from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from azureml_strategy.network.log_file import log_folder, log_settings, own_log


def planned(folder: Path, **configured: str) -> dict[str, str]:
    sources = {name: (value, "environment") for name, value in configured.items()}
    return {setting.variable: setting.value for setting in log_settings(sources, folder)}


def test_nccl_writes_one_file_for_each_process(tmp_path: Path) -> None:
    settings = planned(tmp_path)
    assert settings == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p.log"}
    host = socket.gethostname().partition(".")[0]
    assert own_log(settings) == tmp_path / f"nccl.{host}.{os.getpid()}.log"


def test_a_log_that_the_user_wants_is_left_as_it_is(tmp_path: Path) -> None:
    assert planned(tmp_path, NCCL_DEBUG="WARN") == {}
    assert planned(tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="/mine") == {}
    assert planned(tmp_path, NCCL_DEBUG_FILE="/mine.%p") == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize("level", ["INFO", "info", "TRACE", "ABORT"])
def test_the_users_own_file_is_read_back(level: str) -> None:
    assert own_log({"NCCL_DEBUG": level, "NCCL_DEBUG_FILE": "/logs/a.%p.%p"}) == Path(
        f"/logs/a.{os.getpid()}.{os.getpid()}"
    )


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/a"}, "NCCL_DEBUG=WARN keeps NCCL from telling it. Remove"),
        ({"NCCL_DEBUG": "VERSION"}, "NCCL_DEBUG=VERSION keeps NCCL from telling it."),
        ({"NCCL_DEBUG": "INFO"}, "NCCL_DEBUG=INFO writes to standard output, .* `azureml-strategy doctor --log FILE`"),
    ],
)
def test_why_there_is_no_log_to_read(variables: dict[str, str], text: str) -> None:
    with pytest.raises(LookupError, match=text):
        own_log(variables)


@pytest.mark.parametrize(
    ("subsystems", "told"),
    [("COLL", False), ("^INIT,ENV", False), ("INIT,ENV", True), ("net", True), ("ALL", True), ("^COLL", True)],
)
def test_subsystems_that_leave_the_transport_out(subsystems: str, told: bool) -> None:
    variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/log", "NCCL_DEBUG_SUBSYS": subsystems}
    if told:
        assert own_log(variables) == Path("/tmp/log")
    else:
        with pytest.raises(LookupError, match="Remove NCCL_DEBUG_SUBSYS"):
            own_log(variables)


def test_in_a_job_the_log_is_among_those_that_are_uploaded(tmp_path: Path) -> None:
    assert log_folder(azure=True) == tmp_path / "logs/nccl"  # each test has a working folder of its own
    assert (tmp_path / "logs/nccl").is_dir()


def test_elsewhere_it_is_temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    assert log_folder(azure=False) == tmp_path / "tmp/azureml_strategy_nccl"
    assert not (tmp_path / "logs").exists()


def test_a_working_folder_that_takes_no_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "logs").write_text("a file where a folder should be")
    assert log_folder(azure=True) == tmp_path / "azureml_strategy_nccl"
    assert log_folder(azure=True).is_dir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "logs"))
    assert log_folder(azure=True) == tmp_path / "logs/azureml_strategy_nccl"  # NCCL fails to open its log, and goes on
