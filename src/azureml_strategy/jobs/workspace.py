"""Workspaces, open or closed off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from azureml_strategy.jobs.client import check_resource_id, plain, quiet_sdk
from azureml_strategy.jobs.service_errors import JobError, service_errors

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Workspace

# What the command line calls the ways in which a workspace's nodes may reach the internet, and Azure ML's names.
NETWORKS = {
    "public": None,
    "internet-outbound": "AllowInternetOutbound",
    "approved-outbound": "AllowOnlyApprovedOutbound",
}


@dataclass(frozen=True, kw_only=True)
class WorkspaceRequest:
    """A workspace to make.

    Attributes:
        name: of the workspace.
        region: such as `westeurope`; clusters are made in the same.
        description, display_name: for its page.
        high_business_impact: Azure collects less diagnostic data, and nodes encrypt their local disks. For good: it
            cannot be changed later.
        key, key_vault: your own key, as the key's URI, and the resource id of the vault that has it; for good as well.
        network: one of `NETWORKS`: `internet-outbound` and `approved-outbound` put nodes into a network that Azure ML
            manages, the second with no way out but approved ones.
        public_access: whether the workspace answers from the internet; if not, only through private endpoints.
        storage_account, container_registry, application_insights: resource ids of your own; None: Azure ML makes one.
            The last takes the diagnostics of deployed models.
        build_cluster: cluster that builds images, where the registry is behind a network.
        identity_based_storage: reach storage by each user's own rights instead of the account's key.
        tags: for the subscription's owner.
    """

    name: str
    region: str
    description: str | None = None
    display_name: str | None = None
    high_business_impact: bool = False
    key: str | None = None
    key_vault: str | None = None
    network: str = "public"
    public_access: bool = True
    storage_account: str | None = None
    container_registry: str | None = None
    application_insights: str | None = None
    build_cluster: str | None = None
    identity_based_storage: bool = False
    tags: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if (self.key is None) != (self.key_vault is None):
            raise JobError("A key of your own needs both --key URI and --key-vault ID, the vault's resource id.")
        if self.network not in NETWORKS:
            raise JobError(f"There is no network {self.network!r}. Type one of {', '.join(NETWORKS)}.")
        for name in ("key_vault", "storage_account", "container_registry", "application_insights"):
            check_resource_id(f"--{name.replace('_', '-')}", getattr(self, name))


def render_workspace(request: WorkspaceRequest) -> Workspace:
    """The workspace as azure-ai-ml's entity; nothing is asked of Azure."""
    quiet_sdk()
    from azure.ai.ml.entities import CustomerManagedKey, ManagedNetwork, Workspace

    isolation = NETWORKS[request.network]
    key = CustomerManagedKey(key_vault=request.key_vault, key_uri=request.key) if request.key else None
    return Workspace(
        name=request.name,
        location=request.region,
        description=request.description,
        display_name=request.display_name or request.name,
        hbi_workspace=request.high_business_impact,
        customer_managed_key=key,
        managed_network=ManagedNetwork(isolation_mode=isolation) if isolation else None,
        public_network_access="Enabled" if request.public_access else "Disabled",
        storage_account=request.storage_account,
        container_registry=request.container_registry,
        application_insights=request.application_insights,
        image_build_compute=request.build_cluster,
        system_datastores_auth_mode="identity" if request.identity_based_storage else None,
        tags=request.tags or {},
    )


def create_workspace(client: MLClient, workspace: Workspace) -> Workspace:
    """Make the workspace, with a storage account, key vault and Application Insights where none are given.

    Raises:
        JobError: there is one of this name. Most choices above are for good, so that it is not changed.
        ServiceError: no permission, or something of it cannot be had.
    """
    with service_errors():
        if _exists(client, str(workspace.name)):
            raise JobError(
                f"There is a workspace {workspace.name} in this resource group: see `azureml-strategy workspace show`. "
                "Give another name to make another."
            )
        made: Workspace = client.workspaces.begin_create(workspace).result()
    return made


def _exists(client: MLClient, name: str) -> bool:
    from azure.core.exceptions import ResourceNotFoundError

    try:
        client.workspaces.get(name)
    except ResourceNotFoundError:
        return False
    return True


def show_workspace(client: MLClient, name: str | None = None) -> Workspace:
    """A workspace as it is now; by default the client's own.

    Raises:
        ServiceError: there is none of this name.
    """
    with service_errors():
        found: Workspace = client.workspaces.get(name or client.workspace_name)
    return found


def diagnose_workspace(client: MLClient, name: str | None = None) -> list[str]:
    """What Azure ML finds wrong with a workspace's network, storage, registry and key vault: a line each.

    Raises:
        ServiceError: there is none of this name, or it cannot be examined.
    """
    with service_errors():
        found = client.workspaces.begin_diagnose(name or client.workspace_name).result()
    results = [result for kind in vars(found).values() if isinstance(kind, list) for result in kind]
    return [f"{plain(result.level)}: {result.code}: {result.message}" for result in results]
