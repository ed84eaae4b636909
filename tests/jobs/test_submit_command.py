"""`azureml-strategy submit` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml
from azure.ai.ml import load_job
from tests.jobs.azure_service.exchange import Reply
from tests.jobs.azure_service.faults import Fault
from tests.jobs.azure_service.service import AzureService
from tests.jobs.rendering import SIZE, cache, own_recipe
from tests.preloaded import Forked

from azureml_strategy.cli import main

__all__ = ["cache"]  # a fixture
PRICED = "cluster.price_per_hour=3.5"


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked over the network ends at a port where nobody listens."""
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")


@pytest.mark.usefixtures("_offline")
def test_a_dry_run_prints_what_azure_ai_ml_loads(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["resnet50_imagenet", "cluster=nd96amsr_a100_v4", "--dry-run", "cluster.num_nodes=4", "--name", "a-1"]
    assert main(["submit", *arguments]) == 0
    printed = capsys.readouterr()
    Path("job.yaml").write_text(printed.out)
    job = load_job("job.yaml")
    assert (job.name, job.resources.instance_count, job.distribution.process_count_per_instance) == ("a-1", 4, 8)
    assert printed.err.splitlines()[0].startswith("image: built by Azure ML from 4 files, 1.")
    assert printed.err.splitlines()[1].startswith("the workspace must have: compute nd96amsr-a100-v4")


@pytest.mark.usefixtures("_offline")
def test_the_options_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = own_recipe("runs/mine.yaml")
    lines = [
        ["--dry-run", recipe, SIZE, "seed=3"],
        [recipe, "--dry-run", SIZE, "seed=3"],
        [recipe, SIZE, "seed=3", "--dry-run"],
    ]
    printed = []
    for line in lines:
        assert main(["submit", *line]) == 0
        captured = capsys.readouterr()
        told = captured.err.splitlines()  # beside what is printed, so that the latter stays YAML
        assert told[0] == "code: ., 1 file, less than 0.1 MB"
        assert [each.partition(":")[0] for each in told[1:]] == ["image", "the workspace must have"]
        printed.append(captured.out)
    assert printed[0] == printed[1] == printed[2]
    assert " seed=3 output_dir=${{outputs.run}}" in yaml.safe_load(printed[0])["command"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["resnet50_ddp", "--dry-run"], "azureml-strategy: No cluster is chosen"),
        (["resnet50_dpd", "--dry-run", SIZE], "azureml-strategy: There is no recipe 'resnet50_dpd'"),
        (["resnet50_ddp", SIZE, "+vars.api_key=0a1b2c3d", "--dry-run"], "vars.api_key looks like a secret"),
        (["resnet50_ddp", SIZE, "-m"], "unrecognized arguments: -m"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["submit", *arguments])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2
    assert words in captured.err
    assert "0a1b2c3d" not in captured.err
    assert not captured.out


def test_a_job_and_its_page_are_told(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "resnet50_ddp", SIZE, PRICED, "--name", "told"]) == 0
    assert capsys.readouterr().out == (f"told\nhttps://ml.azure.com/runs/told?wsid={azure_service.workspace.id}\n")
    sent = json.dumps(azure_service.jobs["told"].body)
    for name, value in azure_service.environment.items():
        if name in ("AZURE_CLIENT_SECRET", "AZURE_CLIENT_ID", "AZURE_TENANT_ID"):
            assert value not in sent


def test_a_secret_in_the_file_of_a_recipe_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hf_" + "aB3" * 11
    recipe = own_recipe("mine.yaml", f"vars: {{note: {secret}, other: '${{oc.env:HF_TOKEN}}'}}")
    assert main(["submit", recipe, SIZE, "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("azureml-strategy: vars.note looks like a secret")
    assert secret not in captured.err + captured.out


@pytest.mark.parametrize(("end", "code"), [("Completed", 0), ("Failed", 1)])
def test_following_ends_as_the_job_does(
    azure_service: AzureService, capsys: pytest.CaptureFixture[str], end: str, code: int
) -> None:
    azure_service.jobs.states = ("Running", end)
    azure_service.write_log("followed", "Epoch 0: batch 1/1, images/s 10.0\n")
    assert main(["submit", "resnet50_ddp", SIZE, PRICED, "--name", "followed", "--follow"]) == code
    printed = capsys.readouterr().out
    assert printed.index("https://ml.azure.com/runs/followed") < printed.index("Epoch 0")
    assert f"Throughput: 10.0 images/s (median of 1 readings)\nStatus: {end}\n" in printed


def test_another_workspace(azure_service: AzureService) -> None:
    azure_service.add_workspace("other")
    assert main(["submit", "resnet50_ddp", SIZE, PRICED, "--workspace", "other", "--name", "a"]) == 0
    assert main(["submit", "resnet50_ddp", SIZE, PRICED, "job.workspace.name=other", "--name", "b"]) == 0
    rest = ["job.workspace.name=other", "--resource-group", azure_service.workspace.id.split("/")[4], "--name", "c"]
    assert main(["submit", "resnet50_ddp", SIZE, PRICED, *rest]) == 0, "an option leaves the other settings alone"
    assert list(azure_service.workspaces["other"].jobs) == ["a", "b", "c"]
    assert not list(azure_service.jobs)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("<html>Sign in to the network</html>", "text/html"),
        ("<html>", "application/json"),
        ("", "application/json"),
        ("null", "application/json"),
        ("{}", "application/json"),
        ('{"id": "x", "na', "application/json"),
    ],
)
def test_an_answer_that_cannot_be_read_names_the_job(
    azure_service: AzureService, capsys: pytest.CaptureFixture[str], content: str, kind: str
) -> None:
    """The job may be there: without its name, the same command would start a second one."""
    reply = Reply(content, 200, {"Content-Type": kind})
    azure_service._faults.append(Fault("PUT", r"/jobs/", 1, reply, handled=True))
    assert main(["submit", "resnet50_ddp", SIZE, PRICED]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    (made,) = azure_service.jobs
    assert said.startswith("azureml-strategy: Azure's answer ")
    assert f"Whether job {made} was made is not known. The same command with --name {made} takes it up" in said
    assert main(["submit", "resnet50_ddp", SIZE, PRICED, "--name", made]) == 0
    assert list(azure_service.jobs) == [made]


def test_the_other_verbs_say_it_in_a_sentence_too(
    azure_service: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in ("<html>", "null"):
        reply = Reply(content, 200, {"Content-Type": "text/html" if "<" in content else "application/json"})
        azure_service._faults.append(Fault("GET", r"/jobs/some", 1, reply, handled=True))
        assert main(["jobs", "show", "some"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("azureml-strategy: Azure's answer cannot be read (")
        assert said.count("\n") == 1


def test_a_link_that_leads_nowhere_stops_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data").symlink_to("/nowhere")
    assert main(["submit", own_recipe("mine.yaml"), SIZE, "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("azureml-strategy: ./data is a link to /nowhere, which is not there")


def test_a_long_pause_is_told_and_ctrl_c_ends_it(azure_service: AzureService) -> None:
    azure_service.fail("PUT", r"/jobs/", 429, "TooManyRequests", "Slow down.", times=9, retry_after="3600")
    command = [str(Path(sys.executable).with_name("azureml-strategy")), "submit", "resnet50_ddp", SIZE, PRICED]
    process = Forked([*command, "--name", "slow"], os.environ, text=True)
    said = ""
    while "Ctrl-C ends the waiting" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    assert "management.azure.com asks for a pause of 1:00:00 (HTTP 429)" in said
    os.kill(process.pid, signal.SIGINT)
    rest, _ = process.communicate(60)
    assert process.returncode == 130
    assert rest.splitlines()[-1].startswith("azureml-strategy: Interrupted. Whether job slow was made is not known.")
    assert "Traceback" not in rest


def test_what_is_uploaded_costs_and_must_exist_is_told_before(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").touch()
    Path("images").mkdir()
    Path("images/a.bin").write_bytes(bytes(3 * 2**20))
    words = ["train.py", "cluster=nc24ads_a100_v4", "cluster.num_nodes=2", "cluster.allow_ethernet=true", PRICED]
    words += ["--input", "images=./images", "--input", "more=azureml:more@latest"]
    assert main(["submit", *words, "job.environment.name=azureml:own:3", "--dry-run"]) == 0
    told = capsys.readouterr().err
    assert "input images: images, 1 file, 3.0 MB\n" in told
    assert "price: a node 3.5 USD/h, cluster.price_per_hour, 7 USD/h for 2 nodes\n" in told
    assert "the workspace must have: compute nc24ads-a100-v4, data azureml:more@latest, environment own:3" in told


def test_a_script_is_rendered_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    """As by `--dry-run`."""
    from azureml_strategy.jobs import job_yaml, render_script

    Path("train.py").touch()
    job = render_script("train.py", ["--lr", "0.1"], cluster="nc24ads_a100_v4", name="mine")
    assert (
        main(["submit", "train.py", "cluster=nc24ads_a100_v4", "--name", "mine", "--dry-run", "--", "--lr", "0.1"]) == 0
    )
    assert job_yaml(job) == capsys.readouterr().out
