"""Endpoints: what a dry run prints, what is sent for each request, what is refused, and what Azure may say."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from azure.ai.ml import load_batch_deployment, load_batch_endpoint, load_online_deployment, load_online_endpoint
from tests.jobs.azure_service import AzureService, Reply, Request
from tests.jobs.rendering import cache

from azureml_strategy.checkpoint.module_record import CLASS, MODULE
from azureml_strategy.cli import main
from azureml_strategy.jobs.deploy import _new_traffic
from azureml_strategy.jobs.endpoints import DeployRequest, document
from azureml_strategy.jobs.image import shipped_dockerfile
from azureml_strategy.jobs.service_errors import JobError

__all__ = ["cache"]  # a fixture

DEPLOY = ["model", "deploy", "digits", "--endpoint", "digits"]
BATCH = [*DEPLOY, "--batch", "--compute", "cpu"]
_ONLINE = """\
app_insights_enabled: false
code_configuration:
  code: CODE
  scoring_script: score.py
endpoint_name: digits
environment:
  build:
    dockerfile_path: Dockerfile
    path: IMAGE
  inference_config:
    liveness_route:
      path: /
      port: 5001
    readiness_route:
      path: /
      port: 5001
    scoring_route:
      path: /score
      port: 5001
environment_variables:
  AZUREML_STRATEGY_MAX_SAMPLES: '64'
instance_count: 2
instance_type: Standard_NC4as_T4_v3
model: azureml:digits:3
name: green
request_settings:
  request_timeout_ms: 90000
tags:
  owner: vision
type: managed
"""
_BATCH = """\
code_configuration:
  code: CODE
  scoring_script: score.py
compute: azureml:cpu
endpoint_name: digits
environment:
  build:
    dockerfile_path: Dockerfile
    path: IMAGE
error_threshold: 0
max_concurrency_per_instance: 1
mini_batch_size: 5
model: azureml:digits@latest
name: default
output_action: append_row
output_file_name: predictions.jsonl
resources:
  instance_count: 1
retry_settings:
  max_retries: 3
  timeout: 1800
"""
_KEPT = "# size: of a new deployment; an existing deployment keeps its size where no option gives another\n"
_FOLDER = re.compile(r"\S*/azureml_strategy/environments/\w+")


def printed(capsys: pytest.CaptureFixture[str]) -> tuple[str, str, str]:
    """The endpoint, the deployment, and the comments of a dry run."""
    text = capsys.readouterr().out
    endpoint, rest = text.split("---\n")
    lines = rest.splitlines(keepends=True)
    assert len(list(yaml.safe_load_all(text))) == 2, "all of it is YAML"
    deployment = "".join(line for line in lines if not line.startswith("#"))
    return endpoint, deployment, "".join(line for line in lines if line.startswith("#"))


def folders(deployment: str) -> tuple[Path, Path]:
    """Code and image."""
    content = yaml.safe_load(deployment)
    return Path(content["code_configuration"]["code"]), Path(content["environment"]["build"]["path"])


def test_a_dry_run_of_an_online_endpoint_prints_what_azure_takes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--version", "3", "--deployment", "green", "--instance-type", "NC4as_T4_v3", "--instance-count", "2"]
    assert main([*DEPLOY, *options, "--max-samples", "64", "--tag", "owner=vision", "--dry-run"]) == 0
    endpoint, deployment, comments = printed(capsys)
    assert endpoint == "auth_mode: key\nname: digits\ntags:\n  owner: vision\n"
    code, image = folders(deployment)
    assert deployment.replace(str(code), "CODE").replace(str(image), "IMAGE") == _ONLINE
    assert document(load_online_endpoint(io.StringIO(endpoint))) == endpoint
    assert document(load_online_deployment(io.StringIO(deployment))) == deployment
    assert f"# code: {code}, with score.py: 1 file, less than 0.1 MB\n" in comments
    assert "azureml-inference-server-http==1.4.1, on openmpi5.0-cuda12.6-ubuntu24.04" in comments
    assert '# curl "$URI" -H "Authorization: Bearer $KEY"' in comments
    assert _KEPT not in comments
    assert main([*DEPLOY, "--dry-run"]) == 0
    assert _KEPT in printed(capsys)[2]


def test_a_dry_run_of_a_batch_endpoint_prints_what_azure_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BATCH, "--mini-batch-size", "5", "--dry-run"]) == 0
    endpoint, deployment, comments = printed(capsys)
    code, image = folders(deployment)
    assert deployment.replace(str(code), "CODE").replace(str(image), "IMAGE") == _BATCH
    assert document(load_batch_endpoint(io.StringIO(endpoint))) == endpoint
    loaded: Any = load_batch_deployment(io.StringIO(deployment))
    assert (loaded.mini_batch_size, loaded.resources.instance_count, loaded.model) == (5, 1, "digits@latest")
    assert (code / "score.py").read_text().startswith('"""The scoring script of a batch endpoint')
    assert "azureml-core==" in comments
    assert "# JOB=$(az ml batch-endpoint invoke --name digits --deployment-name default" in comments
    assert _KEPT in comments


@pytest.mark.parametrize(
    ("size", "cuda"),
    [
        ("Standard_DS3_v2", False),
        ("F4s_v2", False),
        ("Standard_NC4as_T4_v3", True),
        ("NV36ads_A10_v5", True),
        (None, False),
    ],
)
def test_a_machine_without_gpus_gets_no_cuda(capsys: pytest.CaptureFixture[str], size: str | None, cuda: bool) -> None:
    assert main([*DEPLOY, *(["--instance-type", size] if size else []), "--dry-run"]) == 0
    _, deployment, comments = printed(capsys)
    dockerfile = (folders(deployment)[1] / "Dockerfile").read_text()
    assert ("FROM mcr.microsoft.com/azureml/openmpi5.0-cuda12.6-ubuntu24.04:2" in dockerfile) == cuda
    assert ("--extra-index-url https://download.pytorch.org/whl/cpu " in dockerfile) != cuda
    assert ("on openmpi5.0-ubuntu24.04:2" in comments) != cuda


def test_an_endpoint_that_keeps_its_gpus_keeps_cuda(azure_service: AzureService, tmp_path: Path) -> None:
    register(tmp_path)
    for size in (["--instance-type", "Standard_NC4as_T4_v3"], []):
        assert main([*DEPLOY, *size]) == 0
    client = azure_service.client()
    found = client.online_deployments.get("default", "digits")
    assert found.instance_type == "Standard_NC4as_T4_v3"
    sent = [each.json["properties"]["environmentId"] for each in azure_service.asked("PUT", "/deployments/default")]
    assert len(sent) == 2
    assert sent[0] == sent[1]


def test_checkpoints_and_logs_stay_here_and_the_rest_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [
        "net.py",
        "logs/view.py",
        "logs/run.txt",
        "a/checkpoints/last.ckpt",
        "best.ckpt",
        "train.log",
        "classes.json",
    ]
    for name in names:
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(name)
    assert main([*DEPLOY, "--code", str(tmp_path / "code"), "--dry-run"]) == 0
    _, deployment, comments = printed(capsys)
    code = folders(deployment)[0]
    there = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}
    assert there == {"net.py", "logs/view.py", "classes.json", "score.py"}
    assert "4 files, less than 0.1 MB; left out as results of a training: " in comments


def test_the_image_has_one_version_of_each_package(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("timm\n")
    for kind in ([*DEPLOY, "--instance-type", "NC4as_T4_v3"], BATCH):
        assert main([*kind, "--requirements", "requirements.txt", "--dry-run"]) == 0
        image = folders(printed(capsys)[1])[1]
        pins = [line for name in ("constraints.txt", "serving.txt") for line in (image / name).read_text().splitlines()]
        names = [line.partition("==")[0] for line in pins if "==" in line and "python_full_version" not in line]
        assert len(names) == len(set(names)) > 250
        assert "torch==2.13.0" in pins
        assert (image / "own.txt").read_text() == "timm\n"
        assert len(list(image.glob("azureml_strategy-*.whl"))) == 1
        assert (image / "Dockerfile").read_text().count(shipped_dockerfile().split("FROM ")[1].split("\n")[0]) == 1


def test_code_of_the_users_goes_with_the_scoring_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine" / "package").mkdir(parents=True)
    (tmp_path / "mine" / "my_parts.py").write_text("x = 1\n")
    (tmp_path / "mine" / "package" / "a.py").write_text("y = 1\n")
    (tmp_path / "mine" / ".env").write_text("SECRET=1\n")
    assert main([*DEPLOY, "--code", "mine", "--dry-run"]) == 0
    code = folders(printed(capsys)[1])[0]
    found = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}
    assert found == {"my_parts.py", "package/a.py", "score.py"}
    (tmp_path / "mine" / "score.py").write_text("mine\n")
    assert main([*DEPLOY, "--code", "mine", "--dry-run"]) == 2
    assert "mine has a score.py, which is the name of the scoring script. Rename yours." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--compute", "cpu"], "--compute is for batch endpoints: add --batch."),
        (["--batch"], "A batch endpoint predicts on a cluster. Type --compute NAME"),
        (
            ["--batch", "--compute", "c", "--traffic", "5"],
            "--traffic is for online endpoints: leave it or --batch out.",
        ),
        (["--batch", "--compute", "c", "--mini-batch-size", "0"], "--mini-batch-size is 0. Give a number from 1 on."),
        (["--traffic", "101"], "--traffic is 101. Give per cent, from 0 to 100."),
        (["--instance-count", "0"], "--instance-count is 0. Give a number from 1 to 50."),
        (["--max-samples", "-1"], "--max-samples is -1. Give a number from 1 on."),
        (["--instance-type", "big one"], "--instance-type big one is no name of a VM size."),
        (["--instance-type", "Standard_NC24rs_v3"], "was retired on 2025-09-30"),
        (["--deployment", "a"], "--deployment is 'a'. A name has 3 to 32 letters, digits and -"),
        (["--code", "absent"], "--code is absent, but there is no such folder."),
        (["--requirements", "absent"], "--requirements is absent, but there is no such file."),
        (["--code", "."], "which holds no file"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DEPLOY, *options, "--dry-run"]) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_our_image_and_another_one_are_not_both_meant() -> None:
    with pytest.raises(JobError, match="Keep one of them"):
        DeployRequest(model="m", endpoint="end", environment="azureml:e@latest", requirements=Path(__file__))


def register(tmp_path: Path, class_name: str | None = "azureml_strategy.models.LanguageModel") -> None:
    record = {} if class_name is None else {MODULE: {CLASS: class_name}}
    torch.save({"state_dict": {"weight": torch.zeros(2)}, **record}, tmp_path / "a.ckpt")
    assert main(["model", "register", "digits", "--path", str(tmp_path / "a.ckpt")]) == 0


def test_an_online_endpoint_is_made_and_gets_all_requests(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(tmp_path)
    assert main(DEPLOY) == 0
    told = capsys.readouterr().out
    assert "digits/default: azureml:digits:1 on 1 Standard_DS3_v2, 100 % of the requests to https://digits." in told
    stored = azure_service.workspace.resources
    assert stored["onlineEndpoints/digits"]["properties"]["traffic"] == {"default": 100}
    properties = stored["onlineEndpoints/digits/deployments/default"]["properties"]
    assert properties["model"].endswith("/models/digits/versions/1")
    assert properties["codeConfiguration"]["scoringScript"] == "score.py"
    assert properties["instanceType"] == "Standard_DS3_v2"
    assert properties["requestSettings"]["requestTimeout"] == "PT1M30S"
    (image,) = [each["properties"] for name, each in stored.items() if name.startswith("environments/")]
    assert image["inferenceConfig"]["scoringRoute"] == {"path": "/score", "port": 5001}
    assert [name for name in azure_service.blobs.content if name.endswith("/score.py")]


def test_a_second_deployment_takes_what_it_is_given(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(tmp_path)
    endpoint = "onlineEndpoints/digits"
    assert main(DEPLOY) == 0
    assert main([*DEPLOY, "--deployment", "green"]) == 0
    assert azure_service.workspace.resources[endpoint]["properties"]["traffic"] == {"default": 100}
    assert "digits/green: azureml:digits:1 on 1 Standard_DS3_v2, 0 % of the requests" in capsys.readouterr().out
    assert main([*DEPLOY, "--deployment", "green", "--traffic", "30"]) == 0
    assert azure_service.workspace.resources[endpoint]["properties"]["traffic"] == {"default": 70, "green": 30}
    assert len(azure_service.asked("PUT", "/onlineEndpoints/digits$")) == 3  # made once, and its traffic twice


def test_a_deployment_that_is_there_keeps_the_sizes_that_no_option_gives(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(tmp_path)
    name = "onlineEndpoints/digits/deployments/default"
    assert main([*DEPLOY, "--instance-type", "NC4as_T4_v3", "--instance-count", "3", "--max-samples", "64"]) == 0
    assert main(DEPLOY) == 0
    assert "azureml:digits:1 on 3 Standard_NC4as_T4_v3, 100 %" in capsys.readouterr().out.splitlines()[-5]
    assert sizes(azure_service, name) == ("Standard_NC4as_T4_v3", 3, {"AZUREML_STRATEGY_MAX_SAMPLES": "64"})
    assert main([*DEPLOY, "--instance-count", "2", "--max-samples", "8"]) == 0
    assert sizes(azure_service, name) == ("Standard_NC4as_T4_v3", 2, {"AZUREML_STRATEGY_MAX_SAMPLES": "8"})
    assert main([*DEPLOY, "--deployment", "green"]) == 0
    assert sizes(azure_service, name.replace("default", "green")) == ("Standard_DS3_v2", 1, {})


def sizes(azure_service: AzureService, name: str) -> tuple[str, int, dict[str, str]]:
    """Instance type, instance count and variables."""
    stored = azure_service.workspace.resources[name]
    properties = stored["properties"]
    return properties["instanceType"], stored["sku"]["capacity"], properties["environmentVariables"]


def test_traffic_that_changes_while_a_deployment_is_made_is_kept(azure_service: AzureService, tmp_path: Path) -> None:
    register(tmp_path)
    assert main(DEPLOY) == 0
    assert main([*DEPLOY, "--deployment", "blue"]) == 0
    endpoint = azure_service.workspace.resources["onlineEndpoints/digits"]["properties"]

    def someone_else() -> None:
        endpoint["traffic"] = {"default": 50, "blue": 50}

    while_made(azure_service, "digits/deployments/green", someone_else)
    assert main([*DEPLOY, "--deployment", "green", "--traffic", "10"]) == 0
    changed = azure_service.workspace.resources["onlineEndpoints/digits"]["properties"]
    assert changed["traffic"] == {"default": 45, "blue": 45, "green": 10}


def while_made(azure_service: AzureService, name: str, happens: Callable[[], None]) -> None:
    """Let something happen when a deployment is asked for."""

    def answer(request: Request) -> Reply:
        if request.method == "PUT" and request.path.endswith(name):
            happens()
        return azure_service.manage(request)

    azure_service.hosts["management.azure.com"] = answer


@pytest.mark.parametrize(
    ("before", "wanted", "shares"),
    [
        ({}, None, {"new": 100}),
        ({"new": 40}, None, {"new": 100}),
        ({"old": 100}, None, None),
        ({"old": 100, "new": 0}, 10, {"old": 90, "new": 10}),
        ({"a": 50, "b": 50}, 1, {"a": 50, "b": 49, "new": 1}),
        ({"a": 33, "b": 33, "c": 34}, 10, {"a": 30, "b": 30, "c": 30, "new": 10}),
        ({"a": 1, "b": 99}, 100, {"a": 0, "b": 0, "new": 100}),
    ],
)
def test_traffic_is_always_a_hundred_per_cent(
    before: dict[str, int], wanted: int | None, shares: dict[str, int] | None
) -> None:
    assert _new_traffic(before, "new", wanted) == shares
    assert shares is None or sum(shares.values()) == 100


def test_requests_without_a_deployment_are_refused_before_anything_is_made(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(tmp_path)
    assert main([*DEPLOY, "--traffic", "10"]) == 2
    assert "--traffic 10 leaves 90 % of the requests to other deployments, and there is none" in capsys.readouterr().err
    assert not azure_service.asked("PUT", "Endpoints")


def test_a_batch_endpoint_is_made_with_a_default(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(tmp_path)
    assert main(["cluster", "create", "--size", "nc24ads_a100_v4", "--name", "cpu"]) == 0
    assert main(BATCH) == 0
    assert "digits/default: azureml:digits:1, the endpoint's default" in capsys.readouterr().out
    stored = azure_service.workspace.resources
    assert stored["batchEndpoints/digits"]["properties"]["defaults"] == {"deploymentName": "default"}
    properties = stored["batchEndpoints/digits/deployments/default"]["properties"]
    assert properties["outputFileName"] == "predictions.jsonl"
    assert properties["miniBatchSize"] == 10
    assert properties["errorThreshold"] == 0
    assert properties["retrySettings"] == {"maxRetries": 3, "timeout": "PT30M"}
    assert properties["compute"].endswith("/computes/cpu")


def test_a_second_batch_deployment_gets_no_calls_until_it_is_made_the_default(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(tmp_path)
    assert main(["cluster", "create", "--size", "nc24ads_a100_v4", "--name", "cpu"]) == 0
    assert main(BATCH) == 0
    assert main([*BATCH, "--deployment", "green"]) == 0
    told = capsys.readouterr().out
    assert "digits/green: azureml:digits:1; the endpoint's default stays default\n" in told
    assert "invoke --name digits --deployment-name green --input" in told
    command = "az ml batch-endpoint update --name digits --set defaults.deployment_name="
    assert told.endswith(f"{command}green\n")
    stored = azure_service.workspace.resources["batchEndpoints/digits"]["properties"]
    assert stored["defaults"] == {"deploymentName": "default"}
    assert main(BATCH) == 0
    told = capsys.readouterr().out
    assert "digits/default: azureml:digits:1, the endpoint's default" in told
    assert command not in told
    assert len(azure_service.asked("PUT", "/batchEndpoints/digits$")) == 2  # made once, and its default once


def test_a_batch_deployment_that_is_there_keeps_the_sizes_that_no_option_gives(
    azure_service: AzureService, tmp_path: Path
) -> None:
    register(tmp_path)
    assert main(["cluster", "create", "--size", "nc24ads_a100_v4", "--name", "cpu"]) == 0
    assert main([*BATCH, "--instance-count", "4", "--mini-batch-size", "50", "--max-samples", "64"]) == 0
    assert main(BATCH) == 0
    properties = azure_service.workspace.resources["batchEndpoints/digits/deployments/default"]["properties"]
    assert (properties["resources"]["instanceCount"], properties["miniBatchSize"]) == (4, 50)
    assert properties["environmentVariables"] == {"AZUREML_STRATEGY_MAX_SAMPLES": "64"}
    assert main([*BATCH, "--instance-count", "2"]) == 0
    properties = azure_service.workspace.resources["batchEndpoints/digits/deployments/default"]["properties"]
    assert (properties["resources"]["instanceCount"], properties["miniBatchSize"]) == (2, 50)


def test_a_class_of_the_users_needs_its_code(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(tmp_path, "my_parts.Net")
    assert main(DEPLOY) == 2
    told = capsys.readouterr().err
    assert "The model's class is my_parts.Net, which is not in azureml-strategy. Type --code" in told
    assert "--requirements FILE if my_parts is a package of pip" in told
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_parts.py").write_text("")
    assert main([*DEPLOY, "--code", "mine"]) == 0
    (tmp_path / "requirements.txt").write_text("my-parts\n")
    assert main([*DEPLOY, "--requirements", "requirements.txt"]) == 0


def test_a_model_that_does_not_tell_its_class_says_so_when_it_is_registered(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(tmp_path, None)
    assert "To deploy it, register it with --module-class." in capsys.readouterr().out
    options = ["--module-class", "my_parts.Net", "--input-shape", "3,32,32", "--input-dtype", "uint8"]
    assert main(["model", "register", "digits", "--path", str(tmp_path / "a.ckpt"), *options]) == 0
    assert "--module-class" not in capsys.readouterr().out
    tags = azure_service.workspace.resources["models/digits/versions/2"]["properties"]["tags"]
    assert tags == {"module_class": "my_parts.Net"}


def test_a_model_that_is_not_there_and_a_quota_that_is_not(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(DEPLOY) == 2
    assert capsys.readouterr().err.count("\n") == 1
    register(tmp_path)
    assert main([*DEPLOY, "--version", "7"]) == 2
    assert "HTTP 404" in capsys.readouterr().err
    azure_service.fail("PUT", "/deployments/default", 400, "OutOfQuota", "Not enough quota available for VM.")
    assert main(DEPLOY) == 2
    told = capsys.readouterr().err
    assert "Not enough quota available for VM (OutOfQuota, HTTP 400)." in told.splitlines()[-1]
    assert "take another --instance-type" in told


def test_a_deployment_that_fails_tells_what_is_left_and_how_it_is_removed(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(tmp_path)

    def fail() -> None:
        azure_service.operations.failure = "ResourceNotReady", "User container has crashed or terminated."

    while_made(azure_service, "/deployments/default", fail)
    assert main(DEPLOY) == 2
    told = capsys.readouterr().err
    assert "User container has crashed or terminated (ResourceNotReady)." in told.splitlines()[-1]
    assert told.endswith(
        "The endpoint digits and what there is of the deployment default are left: `az ml online-deployment get-logs "
        "--endpoint-name digits --name default` tells why it failed, `az ml online-endpoint delete --name digits` "
        "removes both.\n"
    )
    while_made(azure_service, "/deployments/green", fail)
    assert main([*DEPLOY, "--deployment", "green"]) == 2
    told = capsys.readouterr().err
    assert told.endswith("`az ml online-deployment delete --endpoint-name digits --name green` removes the latter.\n")
    assert main([*DEPLOY, "--deployment", "blue"]) == 0
    while_made(azure_service, "/deployments/blue", fail)
    assert main([*DEPLOY, "--deployment", "blue"]) == 2
    told = capsys.readouterr().err
    assert "The deployment blue was there before, and is not removed: `az ml online-deployment get-logs " in told
    assert "delete" not in told, "it may still answer requests"
    while_made(azure_service, "/deployments/default", fail)
    assert main(["cluster", "create", "--size", "nc24ads_a100_v4", "--name", "cpu"]) == 0
    assert main(BATCH) == 2
    told = capsys.readouterr().err
    assert "`az ml batch-deployment show --endpoint-name digits --name default` tells its state, " in told
    assert told.endswith("`az ml batch-endpoint delete --name digits` removes both.\n")


def test_an_endpoint_that_is_not_made_leaves_nothing(
    azure_service: AzureService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(tmp_path)
    azure_service.fail("PUT", "/onlineEndpoints/digits$", 403, "AuthorizationFailed", "You may not.")
    assert main(DEPLOY) == 2
    assert "left" not in capsys.readouterr().err
