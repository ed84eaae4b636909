"""Submitting to the loopback service, with azure-ai-ml's own client."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.azure_service.exchange import Reply, Request
from tests.jobs.azure_service.service import AzureService
from tests.jobs.rendering import SIZE, cache, own_recipe

from azureml_strategy.jobs import JobError, ServiceError, SubmittedJob, follow, submit_recipe
from azureml_strategy.jobs.submit import new_job_name

__all__ = ["cache"]  # a fixture
PRICED = "cluster.price_per_hour=3.5"  # nobody is asked for a price then


def properties(service: AzureService, name: str) -> dict[str, Any]:
    follow: dict[str, Any] = service.jobs[name].body["properties"]
    return follow


def add_data(service: AzureService, name: str) -> None:
    uri = f"azureml://datastores/workspaceblobstore/paths/{name}"
    service.workspace._store(f"data/{name}/versions/3", {"properties": {"dataType": "uri_folder", "dataUri": uri}})


def test_a_job_is_submitted_once_with_all_that_it_needs(azure_service: AzureService) -> None:
    add_data(azure_service, "imagenet")
    job = submit_recipe("resnet50_imagenet", ["cluster=nd96amsr_a100_v4", "cluster.num_nodes=4", PRICED])
    assert re.fullmatch(r"resnet50_imagenet_\d{8}_\d{6}_[0-9a-f]{6}", job.name)
    assert job.run_id == job.name
    assert job.studio_url.startswith(f"https://ml.azure.com/runs/{job.name}?wsid=/subscriptions/")
    assert list(azure_service.jobs) == [job.name]
    sent = properties(azure_service, job.name)
    assert sent["command"].endswith(" data.root=${{inputs.images}} output_dir=${{outputs.run}}")
    assert sent["distribution"] == {"distributionType": "PyTorch", "processCountPerInstance": 8}
    assert sent["resources"]["instanceCount"] == 4
    assert sent["resources"]["dockerArgs"] == "--ulimit memlock=-1 --ulimit stack=67108864"
    assert sent["computeId"].endswith("/computes/nd96amsr-a100-v4")
    assert sent["inputs"]["images"]["mode"] == "ReadOnlyMount"
    assert sent["outputs"]["run"]["mode"] == "ReadWriteMount"
    assert sent["environmentVariables"]["AZUREML_STRATEGY_PRICE_PER_HOUR"] == "3.5"
    assert sent["inputs"]["images"]["uri"].endswith("/data/imagenet/versions/3")
    assert "/environments/" in sent["environmentId"]
    context = [name for name in azure_service.blobs.content if name.endswith(("/Dockerfile", ".whl"))]
    assert len(context) == 2, "the image's folder is in the workspace's storage"


def test_a_registered_environment_by_its_label(azure_service: AzureService) -> None:
    azure_service.workspace._store("environments/mine/versions/5", {"properties": {"image": "a/b:1"}})
    submit_recipe("resnet50_ddp", [SIZE, PRICED, "job.environment.name=azureml:mine@latest"], name="labelled")
    assert properties(azure_service, "labelled")["environmentId"].endswith("/environments/mine/versions/5")


@pytest.mark.parametrize("path", ["azureml:imagenet@latest", "azureml:imagenet:7"])
def test_data_that_is_not_there_is_named(azure_service: AzureService, path: str) -> None:
    with pytest.raises(JobError, match=rf"job.inputs.images.path is {path}, but workspace workspace has no such data"):
        submit_recipe("resnet50_imagenet", [SIZE, PRICED, f"job.inputs.images.path={path}"])
    assert not azure_service.asked("PUT", "")
    azure_service.fail("GET", r"/data/", 403, "AuthorizationFailed", "No permission.", times=9)
    with pytest.raises(ServiceError, match="AuthorizationFailed"):
        submit_recipe("resnet50_imagenet", [SIZE, PRICED, f"job.inputs.images.path={path}"])


def test_data_is_not_missing_where_nobody_is_signed_in(
    azure_service: AzureService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "wrong")
    with pytest.raises(ServiceError, match="az login"):
        submit_recipe("resnet50_imagenet", [SIZE, PRICED])


def test_code_goes_along_without_what_amlignore_leaves_out(
    azure_service: AzureService, caplog: pytest.LogCaptureFixture
) -> None:
    Path("model.py").touch()
    Path("data").mkdir()
    Path("data/large.bin").touch()
    Path(".amlignore").write_text("data/\n")
    Path("lib/site-packages").mkdir(parents=True)
    Path("lib/site-packages/old.txt").touch()
    Path(".env").write_text("HF_TOKEN=hf_1")
    job = submit_recipe(own_recipe("runs/mine.yaml"), [SIZE, PRICED], name="mine-1")
    assert "code: ., 4 files, less than 0.1 MB; kept here, as secrets by their names: .env. " in caplog.text
    assert "The job gets all of it, site-packages among them" in caplog.text
    assert not [content for content in azure_service.blobs.content.values() if b"hf_1" in content]
    assert submit_recipe("runs/mine.yaml", [SIZE, PRICED], name="mine-1").studio_url == job.studio_url
    assert job.name == "mine-1"
    assert "/codes/" in properties(azure_service, "mine-1")["codeId"]
    stored = [name for name in azure_service.blobs.content if name.endswith((".py", ".yaml", ".bin"))]
    assert {Path(name).name for name in stored if "/conda.yaml" not in name} == {"model.py", "mine.yaml"}


def test_a_recipe_that_amlignore_leaves_out(azure_service: AzureService) -> None:
    Path(".amlignore").write_text("*.yaml\n")
    with pytest.raises(JobError, match=r"mine.yaml is left out by ./.amlignore"):
        submit_recipe(own_recipe("mine.yaml"), [SIZE])
    assert not azure_service.requests, "nothing was sent"


def test_an_answer_that_is_lost_starts_no_second_job(azure_service: AzureService) -> None:
    azure_service.drop("PUT", r"/jobs/", handled=True)
    job = submit_recipe("resnet50_ddp", [SIZE, PRICED])
    assert list(azure_service.jobs) == [job.name]
    puts = azure_service.asked("PUT", r"/jobs/")
    assert len(puts) == 2
    assert puts[0].json == puts[1].json


def test_the_same_name_again_is_the_same_job(azure_service: AzureService) -> None:
    first, second = (submit_recipe("resnet50_ddp", [SIZE, PRICED], name="again") for _ in range(2))
    assert first.studio_url == second.studio_url
    assert list(azure_service.jobs) == ["again"]
    with pytest.raises(ServiceError, match="already exists"):
        submit_recipe("resnet50_ddp", [SIZE, PRICED, "seed=2"], name="again")
    assert len(azure_service.jobs) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_service_is_asked_again(azure_service: AzureService, status: int) -> None:
    azure_service.fail("PUT", r"/jobs/", status, "TooManyRequests", "Slow down.", retry_after="0")
    submit_recipe("resnet50_ddp", [SIZE, PRICED])
    assert len(azure_service.asked("PUT", r"/jobs/")) == 2


def test_what_the_service_refuses_is_one_sentence(azure_service: AzureService) -> None:
    azure_service.fail("PUT", r"/jobs/", 403, "AuthorizationFailed", "The client has no permission.")
    with pytest.raises(ServiceError, match=r"no permission \(AuthorizationFailed, HTTP 403\)\. ") as caught:
        submit_recipe("resnet50_ddp", [SIZE, PRICED], name="refused")
    assert "--name" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_service_that_stays_away_leaves_the_name_to_go_on_with(azure_service: AzureService) -> None:
    azure_service.fail("PUT", r"/jobs/", 501, "InternalServerError", "Oh.")  # one that azure-core does not repeat
    with pytest.raises(ServiceError, match=r"Whether job lost was made is not known\..* --name lost"):
        submit_recipe("resnet50_ddp", [SIZE, PRICED], name="lost")


def test_the_price_of_the_workspaces_region(azure_service: AzureService) -> None:
    item = {
        "meterName": "ND96isrH100v5",
        "productName": "Virtual Machines NDsrH100v5 Series",
        "retailPrice": 98.32,
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "effectiveStartDate": "2024-01-01T00:00:00Z",
    }
    asked: list[Request] = []

    def answer(request: Request) -> Reply:
        asked.append(request)
        return Reply({"Items": [item], "NextPageLink": None})

    azure_service.hosts["prices.azure.com"] = answer
    job = submit_recipe("resnet50_ddp", [SIZE])
    variables = properties(azure_service, job.name)["environmentVariables"]
    assert variables["AZUREML_STRATEGY_PRICE_PER_HOUR"] == "98.32"
    assert variables["AZUREML_STRATEGY_PRICE_CURRENCY"] == "USD"
    assert len(asked) == 1
    assert "westeurope" in str(asked[0].query)


def test_waiting(azure_service: AzureService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(follow, "_LONGEST_PAUSE_S", 0.02)
    azure_service.jobs.states = ("Queued", "Running", "Running", "Canceled")
    job = submit_recipe("resnet50_ddp", [SIZE, PRICED])
    azure_service.fail("GET", r"/jobs/", 400, "Oh", "What?", times=2)
    assert job.wait() == "Canceled"
    assert job.status() == "Canceled"


def test_waiting_has_an_end(azure_service: AzureService) -> None:
    azure_service.jobs.states = ("Running",)
    job = submit_recipe("resnet50_ddp", [SIZE, PRICED])
    with pytest.raises(JobError, match=r"not over after 0\.01 seconds, but Running\. It goes on"):
        job.wait(timeout=0.01)
    with pytest.raises(ServiceError, match="not found"):
        SubmittedJob(job.client, "other", "").wait()


def test_a_name_of_a_job() -> None:
    """Letters, digits, hyphens and underscores."""
    names = {new_job_name("my run.v2") for _ in range(20)}
    assert len(names) == 20
    assert all(re.fullmatch(r"my_run_v2_[\w-]+", name) for name in names)
