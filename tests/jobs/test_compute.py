"""Clusters: what is sent for each request, which requests are refused, and what Azure may say."""

from __future__ import annotations

import io

import pytest
from tests.jobs.azure_service import AzureService, Reply, Request

from azureml_strategy.cli import main
from azureml_strategy.jobs.client import as_yaml
from azureml_strategy.jobs.compute import ClusterRequest, render_cluster
from azureml_strategy.jobs.service_errors import JobError

_H100 = """\
enable_node_public_ip: true
idle_time_before_scale_down: 300
max_instances: 4
min_instances: 0
name: nd96isr-h100-v5
size: Standard_ND96isr_H100_v5
ssh_public_access_enabled: false
tier: dedicated
type: amlcompute
"""
_IDENTITY = (
    "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/g"
    "/providers/Microsoft.ManagedIdentity/userAssignedIdentities/i"
)
_PRIVATE = f"""\
enable_node_public_ip: false
identity:
  type: user_assigned
  user_assigned_identities:
  - resource_id: {_IDENTITY}
idle_time_before_scale_down: 60
location: westeurope
max_instances: 2
min_instances: 1
name: quiet
network_settings:
  subnet: training
  vnet_name: net
size: Standard_NC40ads_H100_v5
ssh_public_access_enabled: false
tags:
  owner: vision
tier: low_priority
type: amlcompute
"""


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        (["--size", "nd96isr_h100_v5", "--max-nodes", "4"], _H100),
        (
            [
                *("--size", "Standard_NC40ads_H100_v5", "--max-nodes", "2", "--min-nodes", "1", "--name", "quiet"),
                *("--tier", "low_priority", "--idle-seconds", "60", "--region", "westeurope", "--vnet", "net"),
                *("--subnet", "training", "--no-public-ip", "--identity", _IDENTITY, "--allow-ethernet"),
                *("--tag", "owner=vision"),
            ],
            _PRIVATE,
        ),
    ],
)
def test_a_dry_run_prints_what_azure_takes(
    arguments: list[str], recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from azure.ai.ml import load_compute

    assert main(["cluster", "create", *arguments, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text == recorded
    assert as_yaml(load_compute(io.StringIO(text))) == recorded


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"vm_size": "nc40ads_h100_v5", "max_nodes": 2}, r"over Ethernet.*Scale up before.*--allow-ethernet"),
        ({"vm_size": "nd96is_h100_v5", "max_nodes": 2}, r"no InfiniBand.*ND96isr_H100_v5.*--allow-ethernet"),
        ({"vm_size": "nc24rs_v3"}, "retired on 2025-09-30"),
        ({"vm_size": "h100"}, "is not the name of an Azure VM size"),
        ({"vm_size": "nd96isr_h100_v5", "min_nodes": 2}, "2 to 1 nodes cannot be"),
        ({"vm_size": "nd96isr_h100_v5", "tier": "spot"}, "no tier 'spot'.*--tier low_priority"),
        ({"vm_size": "nd96isr_h100_v5", "idle_seconds": 0}, "--idle-seconds is 0. Give the seconds, 1 or more"),
        ({"vm_size": "nd96isr_h100_v5", "vnet": "net"}, "add --subnet NAME"),
        ({"vm_size": "nd96isr_h100_v5", "identity": "mine"}, "--identity mine is no resource id"),
        ({"vm_size": "nd96isr_h100_v5", "subnet": "net/training"}, "--subnet net/training is no resource id"),
        ({"vm_size": "nd96isr_h100_v5", "subnet": "training"}, "add --vnet NAME"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(JobError, match=words):
        render_cluster(ClusterRequest(**wrong))  # type: ignore[arg-type]


def test_more_gpus_in_a_node_come_before_more_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cluster", "create", "--size", "nc24ads_a100_v4", "--max-nodes", "2", "--allow-ethernet", "--dry-run"]
    assert main(arguments) == 0
    assert "Scale up before you scale out" in capsys.readouterr().err


def test_a_cluster_is_made_shown_and_deleted(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    azure_service.operations.polls = 3
    assert main(["cluster", "create", "--size", "nd96isr_h100_v5", "--max-nodes", "4"]) == 0
    assert "nd96isr-h100-v5: Succeeded, 0 to 4 nodes" in capsys.readouterr().out
    sent = azure_service.asked("PUT", "/computes/nd96isr-h100-v5")[0].json
    assert sent["location"] == "westeurope"  # the workspace's own
    properties = sent["properties"]["properties"]
    assert properties["vmPriority"] == "Dedicated"
    assert properties["remoteLoginPortPublicAccess"] == "Disabled"
    assert properties["scaleSettings"] == {"maxNodeCount": 4, "minNodeCount": 0, "nodeIdleTimeBeforeScaleDown": "PT5M"}
    assert len(azure_service.asked("GET", "/operations/0")) == 4

    assert main(["cluster", "show"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == [
        "nd96isr-h100-v5",
        "Standard_ND96isr_H100_v5",
        "0",
        "to",
    ]
    assert main(["cluster", "show", "nd96isr-h100-v5"]) == 0
    assert "size: Standard_ND96isr_H100_v5" in capsys.readouterr().out
    assert main(["cluster", "delete", "nd96isr-h100-v5"]) == 0
    assert "computes/nd96isr-h100-v5" not in azure_service.workspace.resources


def test_a_throttled_request_and_a_dropped_one_are_repeated(azure_service: AzureService) -> None:
    azure_service.drop("PUT", "/computes/", handled=True)
    azure_service.fail("PUT", "/computes/", 429, "TooManyRequests", "Slow down.", retry_after="1")
    assert main(["cluster", "create", "--size", "nd96isr_h100_v5"]) == 0
    assert len(azure_service.asked("PUT", "/computes/")) == 3
    assert [name for name in azure_service.workspace.resources if name.startswith("computes/")] == [
        "computes/nd96isr-h100-v5"
    ]


def test_no_quota_is_one_sentence_with_the_next_step(
    azure_service: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    # As Azure ML words it: github.com/ansible-collections/azure, pull request 2209.
    message = (
        "The specified subscription has a Standard NDSH100v5 Family vCPU quota of 0 and cannot accomodate for at least "
        "1 requested managed compute node which maps to 96 vCPUs."
    )
    azure_service.operations.failure = ("ClusterMinNodesExceedCoreQuota", message)
    assert main(["cluster", "create", "--size", "nd96isr_h100_v5"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "quota of 0" in told
    assert "(ClusterMinNodesExceedCoreQuota)." in told
    assert "Ask for more of this VM family" in told


def test_a_cluster_that_was_accepted_and_then_failed(
    azure_service: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails_later(request: Request) -> Reply:
        reply = azure_service.manage(request)
        if request.method == "GET" and request.path.endswith("/computes/nd96isr-h100-v5"):
            reply.content["properties"]["provisioningState"] = "Failed"
        return reply

    azure_service.hosts["management.azure.com"] = fails_later
    assert main(["cluster", "create", "--size", "nd96isr_h100_v5"]) == 2
    assert "was accepted, and then failed: no reason given. Delete it with" in capsys.readouterr().err


def test_a_cluster_that_is_not_there(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "delete", "gpu"]) == 2
    told = capsys.readouterr().err
    assert "ResourceNotFound, HTTP 404" in told
    assert "azureml-strategy cluster create" in told
    assert not azure_service.asked("DELETE", "/computes/")
