"""Workspaces: what is sent for each kind of protection, and one that is there is left alone."""

from __future__ import annotations

import io
import json

import pytest
from tests.jobs.azure_service import AzureService
from tests.jobs.azure_service.exchange import Reply

from azureml_strategy.cli import main
from azureml_strategy.jobs.client import as_yaml
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.workspace import WorkspaceRequest

_RESOURCES = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/g/providers"
_PLAIN = """\
display_name: training
enable_data_isolation: false
hbi_workspace: false
location: westeurope
name: training
public_network_access: Enabled
tags: {}
"""
_CLOSED = f"""\
application_insights: {_RESOURCES}/Microsoft.insights/components/i
container_registry: {_RESOURCES}/Microsoft.ContainerRegistry/registries/r
customer_managed_key:
  cosmosdb_id: ''
  key_uri: https://v.vault.azure.net/keys/k/1
  key_vault: {_RESOURCES}/Microsoft.KeyVault/vaults/v
  search_id: ''
  storage_id: ''
description: for patients
display_name: Closed
enable_data_isolation: false
hbi_workspace: true
image_build_compute: cpu
location: westeurope
managed_network:
  isolation_mode: allow_only_approved_outbound
name: closed
public_network_access: Disabled
storage_account: {_RESOURCES}/Microsoft.Storage/storageAccounts/a
system_datastores_auth_mode: identity
tags:
  owner: vision
"""
_CLOSING = [
    *("closed", "--region", "westeurope", "--display-name", "Closed", "--description", "for patients", "--hbi"),
    *("--key", "https://v.vault.azure.net/keys/k/1", "--key-vault", f"{_RESOURCES}/Microsoft.KeyVault/vaults/v"),
    *("--network", "approved-outbound", "--no-public-access", "--identity-based-storage", "--build-cluster", "cpu"),
    *("--storage-account", f"{_RESOURCES}/Microsoft.Storage/storageAccounts/a"),
    *("--container-registry", f"{_RESOURCES}/Microsoft.ContainerRegistry/registries/r"),
    *("--application-insights", f"{_RESOURCES}/Microsoft.insights/components/i", "--tag", "owner=vision"),
]


@pytest.mark.parametrize(
    ("arguments", "recorded"), [(["training", "--region", "westeurope"], _PLAIN), (_CLOSING, _CLOSED)]
)
def test_a_dry_run_prints_what_azure_takes(
    arguments: list[str], recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from azure.ai.ml import load_workspace

    assert main(["workspace", "create", *arguments, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text == recorded
    loaded = as_yaml(load_workspace(io.StringIO(text)))
    assert loaded.replace("  firewall_sku: standard\n", "") == recorded  # which it fills in


def test_protection_reaches_azure(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workspace", "create", *_CLOSING]) == 0
    assert "closed: made in westeurope" in capsys.readouterr().out
    sent = {
        name: each.get("value")
        for name, each in azure_service.asked("PUT", "/deployments/")[0].json["properties"]["parameters"].items()
    }
    assert sent["confidential_data"] == "true"
    assert sent["encryption_status"] == "Enabled"
    assert sent["resource_cmk_uri"] == "https://v.vault.azure.net/keys/k/1"
    assert sent["publicNetworkAccess"] == "Disabled"
    assert sent["managedNetwork"]["isolationMode"] == "AllowOnlyApprovedOutbound"
    assert sent["systemDatastoresAuthMode"] == "identity"
    assert (sent["storageAccountOption"], sent["storageAccountName"]) == ("existing", "a")
    assert (sent["containerRegistryOption"], sent["containerRegistryName"]) == ("existing", "r")
    assert (sent["applicationInsightsOption"], sent["applicationInsightsName"]) == ("existing", "i")
    assert "closed" in azure_service.workspaces


def test_a_workspace_that_is_there_is_left_alone(
    azure_service: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["workspace", "create", "workspace", "--region", "westeurope"]) == 2
    assert "There is a workspace workspace in this resource group" in capsys.readouterr().err
    assert not azure_service.asked("PUT", "")


def test_it_is_not_made_where_nobody_may_look(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    azure_service.fail("GET", "/workspaces/new", 403, "AuthorizationFailed", "You may not.")
    assert main(["workspace", "create", "new", "--region", "westeurope"]) == 2
    assert "AuthorizationFailed, HTTP 403" in capsys.readouterr().err
    assert not azure_service.asked("PUT", "")


def test_a_part_of_it_that_cannot_be_had(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    azure_service.operations.failure = ("StorageAccountAlreadyTaken", "The storage account named x is already taken.")
    assert main(["workspace", "create", "new", "--region", "westeurope"]) == 2
    told = capsys.readouterr().err
    assert "The storage account named x is already taken (StorageAccountAlreadyTaken). The name is taken." in told
    assert "new" not in azure_service.workspaces


def test_it_is_shown_and_diagnosed(azure_service: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"code": "DnsResolution", "level": "Error", "message": "The storage account cannot be found."}
    azure_service.hosts["management.azure.com"] = lambda request: (
        Reply({"value": {"dnsResolutionResults": [result]}})
        if request.path.endswith("/diagnose")
        else Reply(azure_service.workspace.resource())
    )
    assert main(["workspace", "show", "--diagnose"]) == 0
    shown = capsys.readouterr().out
    assert "name: workspace" in shown
    assert "Error: DnsResolution: The storage account cannot be found." in shown


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"key": "https://v/keys/k"}, "both --key URI and --key-vault ID"),
        ({"storage_account": "fastimages"}, "--storage-account fastimages is no resource id"),
        ({"network": "private"}, "no network 'private'.*approved-outbound"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(JobError, match=words):
        WorkspaceRequest(name="w", region="r", **wrong)  # type: ignore[arg-type]


def test_a_tag_has_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["workspace", "create", "w", "--region", "r", "--tag", "owner", "--dry-run"])
    assert "'owner' is no KEY=VALUE" in capsys.readouterr().err


def test_no_secret_of_the_sign_in_is_sent_but_to_the_sign_in(azure_service: AzureService) -> None:
    from tests.jobs.azure_service.login import SECRET

    assert main(["workspace", "show"]) == 0
    assert all(SECRET not in json.dumps(request.headers) + request.body.decode() for request in azure_service.requests)
