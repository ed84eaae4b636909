"""`submit --check`: each question to the loopback Azure, answered by yes, by no, and not at all; nothing is sent."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.jobs.azure_service.exchange import Reply, Request
from tests.jobs.azure_service.service import AzureService
from tests.jobs.rendering import cache

from azureml_strategy.cli import main

__all__ = ["cache"]  # a fixture
# A node has 48 cores.
SUBMIT = ["submit", "resnet50_ddp", "cluster=nc48ads_a100_v4", "cluster.num_nodes=2", "cluster.allow_ethernet=true"]
SUBMIT += ["cluster.price_per_hour=1"]
FAMILY = "standardNCADSA100v4Family"


@pytest.fixture
def service(azure_service: AzureService) -> AzureService:
    """A workspace with a cluster of four such nodes, and quota for 200 cores, of which 48 are used."""
    azure_service.client().compute.begin_create_or_update(_cluster()).result()
    usages = [(FAMILY, 48, 200), ("Total Cluster LowPriority Regional vCPUs", 0, 10)]
    _answer(azure_service, usages)
    azure_service.requests.clear()
    return azure_service


def _cluster(**settings: Any) -> Any:
    from azure.ai.ml.entities import AmlCompute

    given = {"name": "nc48ads-a100-v4", "size": "Standard_NC48ads_A100_v4", "max_instances": 4, **settings}
    return AmlCompute(**given)


def _answer(service: AzureService, usages: list[tuple[str, int, int]]) -> None:
    """What Azure Resource Manager says of a region: its sizes and quotas."""
    size = {"name": "Standard_NC48ads_A100_v4", "family": FAMILY, "vCPUs": 48, "supportedComputeTypes": ["AmlCompute"]}
    used = [
        {
            "name": {"value": name, "localizedValue": _shown(name)},
            "currentValue": current,
            "limit": limit,
            "unit": "Count",
        }
        for name, current, limit in usages
    ]

    def manage(request: Request) -> Reply:
        found = re.search(r"/locations/westeurope/(vmSizes|usages)$", request.path)
        if found is None:
            return service.manage(request)
        return Reply({"value": [size] if found[1] == "vmSizes" else used})

    service.hosts["management.azure.com"] = manage


def _shown(name: str) -> str:
    return "Standard NCADSA100v4 Family Cluster Dedicated vCPUs" if name == FAMILY else name


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str]]:
    code = main([*SUBMIT, *words, "--check"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("Nothing was sent.")
    return code, {line[4:].partition(":")[0]: line for line in lines[:-1]}


def test_all_is_there_and_nothing_is_sent(service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = asked(capsys)
    assert code == 0
    assert said["login"] == "ok  login: signed in"
    assert said["workspace"] == "ok  workspace: workspace in westeurope"
    assert said["compute"] == "ok  compute: nc48ads-a100-v4, Standard_NC48ads_A100_v4, up to 4 node(s)"
    assert said["quota"].startswith("ok  quota: 96 cores, 152 of 200 are free (Standard NCADSA100v4 Family")
    assert said["data"] == "ok  data: the job names none"
    assert said["image"].startswith("ok  image: Azure ML builds it")
    assert {each.method for each in service.requests} == {"GET"}


@pytest.mark.parametrize(
    ("words", "what", "text"),
    [
        (["cluster.compute=nobody"], "compute", "nobody"),
        (["cluster.num_nodes=5"], "compute", "the job asks for 5, and would wait for ever. azureml-strategy cluster"),
        (["cluster.num_nodes=5"], "quota", "240 cores, 152 of 200 are free"),
        (["+job.inputs.x={path: 'azureml:absent@latest'}"], "data", "has no such data asset"),
        (["+job.inputs.x={path: 'azureml://datastores/absent/paths/a'}"], "data", "absent"),
        (["job.environment.name=azureml:absent:3"], "image", "absent"),
        (["cluster=nd96isr_h100_v5"], "compute", "nd96isr-h100-v5"),
        (["cluster=nd96isr_h100_v5"], "quota", "is not offered in the workspace's region"),
        (["cluster.tier=low_priority", "cluster.compute=nc48ads-a100-v4"], "quota", "96 cores, 10 of 10 are free"),
    ],
)
def test_what_is_missing_is_a_no(
    service: AzureService, capsys: pytest.CaptureFixture[str], words: list[str], what: str, text: str
) -> None:
    code, said = asked(capsys, *words)
    assert code == 1
    assert said[what].startswith("NO  ")
    assert text in said[what]
    assert {each.method for each in service.requests} == {"GET"}


@pytest.mark.usefixtures("service")
def test_without_a_workspace_nothing_more_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = asked(capsys, "job.workspace.name=other")
    assert code == 1
    assert list(said) == ["login", "workspace"]


def test_what_cannot_be_known_is_no_refusal(service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    _answer(service, [("another", 1, 2)])
    code, said = asked(capsys, "job.environment.image=own.azurecr.io/image:1")
    assert code == 0
    assert said["quota"].startswith("?   quota: 96 cores; Azure does not say")
    assert said["image"].startswith("?   image: own.azurecr.io/image:1")
    _answer(service, [(FAMILY, 190, 200)])
    code, said = asked(capsys)
    assert said["quota"].startswith("?   quota: 96 cores, 10 of 200 are free")
