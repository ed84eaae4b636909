"""jobs list, show, logs, cancel and download, as a user types them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.jobs.azure_service import AzureService
from tests.jobs.azure_service.jobs import Job

from azureml_strategy.cli import main


def submit(service: AzureService, name: str, *states: str, **properties: Any) -> Job:
    """A job as it lies in the workspace."""
    body = {
        "properties": {
            "jobType": "Command",
            "command": "azureml-strategy train resnet50_ddp",
            "environmentId": f"{service.workspace.id}/environments/e/versions/1",
            "computeId": f"{service.workspace.id}/computes/gpu",
            "experimentName": "resnet50",
            "resources": {"instanceCount": 2},
            "outputs": {"run": {"jobOutputType": "uri_folder"}},
            "tags": {"recipe": "resnet50_ddp"},
            **properties,
        }
    }
    job = service.jobs._jobs[name] = Job(name, body, list(states), service.jobs.failure)
    return job


def test_the_newest_come_first_and_can_be_chosen(
    azure_service: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(azure_service, "first", "Completed")
    submit(azure_service, "second", "Failed", experimentName="gpt")
    submit(azure_service, "third", "Running")
    assert main(["jobs", "list", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["third", "Running"], ["second", "Failed"]]
    assert lines[1].split()[2:] == ["2026-11-20", "12:00:00", "resnet50", "gpu", "2"]
    assert main(["jobs", "list", "--experiment", "gpt"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("second")
    assert main(["jobs", "list", "--status", "completed"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("first")
    assert main(["jobs", "list", "--status", "Canceled"]) == 0
    assert capsys.readouterr().out == "There are no such jobs.\n"


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_no_jobs_at_all_cannot_be_meant(limit: str, azure_service: AzureService, capsys: Any) -> None:
    assert main(["jobs", "list", f"--limit={limit}"]) == 2
    assert f"--limit {limit} lists no job" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["logs", "job", "--follow", "--list"], ["logs", "job", "--follow", "--file", "a"]])
def test_options_of_which_one_would_count_for_nothing(line: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["jobs", *line])
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_failed_job_says_why_without_its_secrets(
    azure_service: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    azure_service.jobs.failure = ("UserError", "Cannot read https://a.blob.core.windows.net/c?sig=abcdef")
    submit(azure_service, "job", "Failed")
    assert main(["jobs", "show", "job"]) == 0
    shown = capsys.readouterr().out
    assert "status        Failed" in shown
    assert "reason        UserError: Cannot read" in shown
    assert "abcdef" not in shown
    assert "runs on       2 node(s) of gpu" in shown
    assert "https://ml.azure.com/runs/job?wsid=" in shown
    assert "recipe=resnet50_ddp" in shown


def test_a_serverless_job_shows_its_size(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    resources = {"instanceCount": 4, "instanceType": "Standard_ND96isr_H100_v5"}
    submit(azure_service, "job", "Running", computeId=None, resources=resources)
    assert main(["jobs", "show", "job"]) == 0
    assert "runs on       4 node(s) of Standard_ND96isr_H100_v5" in capsys.readouterr().out


def test_the_log_of_the_first_process_is_printed(
    azure_service: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(azure_service, "job", "Running")
    assert main(["jobs", "logs", "job"]) == 2
    assert "It has none yet" in capsys.readouterr().err
    for process in (10, 2, 0):
        azure_service.write_log("job", f"process {process}\n", f"user_logs/std_log_process_{process}.txt")
    assert main(["jobs", "logs", "job"]) == 0
    assert capsys.readouterr().out == "process 0\n"
    assert main(["jobs", "logs", "job", "--file", "user_logs/std_log_process_2.txt"]) == 0
    assert capsys.readouterr().out == "process 2\n"
    assert main(["jobs", "logs", "job", "--file", "none.txt"]) == 2
    assert "std_log_process_10.txt" in capsys.readouterr().err
    assert main(["jobs", "logs", "job", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "user_logs/std_log_process_10.txt" in listed
    assert "sig=" not in listed


def test_a_log_is_followed_to_the_end(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    submit(azure_service, "job", "Running", "Running", "Running", "Completed")
    azure_service.write_log("job", "one\ntwo\n")
    assert main(["jobs", "logs", "job", "--follow"]) == 0
    assert "one\ntwo\n" in capsys.readouterr().out
    submit(azure_service, "bad", "Running", "Failed")
    assert main(["jobs", "logs", "bad", "--follow"]) == 1


def test_a_job_is_cancelled_once(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    submit(azure_service, "job", "Running")
    assert main(["jobs", "cancel", "job"]) == 0
    assert capsys.readouterr().out == "job: Canceled\n"
    assert main(["jobs", "cancel", "job"]) == 2
    assert "job is Canceled already" in capsys.readouterr().err
    assert len(azure_service.asked("POST", "/cancel")) == 1


def test_what_a_job_left_is_fetched(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(azure_service, "job", "Completed")
    azure_service.write_log("job", "the log\n")
    azure_service.write_output("job", "run", "checkpoints/last.ckpt", b"weights")
    assert main(["jobs", "download", "job", "--to", str(tmp_path / "all"), "--all"]) == 0
    assert (tmp_path / "all/artifacts/user_logs/std_log.txt").read_text() == "the log\n"
    assert (tmp_path / "all/named-outputs/run/checkpoints/last.ckpt").read_bytes() == b"weights"
    assert main(["jobs", "download", "job", "--to", str(tmp_path / "one"), "--output", "run"]) == 0
    assert [path.name for path in (tmp_path / "one").rglob("*.*")] == ["last.ckpt"]
    capsys.readouterr()
    assert main(["jobs", "download", "job", "--output", "rum"]) == 2
    assert "no output 'rum'. It has: run" in capsys.readouterr().err


def test_a_running_job_has_nothing_to_fetch(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    submit(azure_service, "job", "Running")
    assert main(["jobs", "download", "job"]) == 2
    assert "job is Running: outputs can be fetched when it is over" in capsys.readouterr().err


def test_a_job_that_is_not_there(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["show", "job"], ["logs", "job"], ["cancel", "job"], ["download", "job"]):
        assert main(["jobs", *arguments]) == 2
        assert "HTTP 404). `azureml-strategy jobs list` shows" in capsys.readouterr().err
