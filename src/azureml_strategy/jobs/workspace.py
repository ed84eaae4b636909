"""Creates, shows and diagnoses workspaces, with public or isolated networks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from azureml_strategy.jobs.client import check_resource_id, plain, quiet_sdk
from azureml_strategy.jobs.service_errors import JobError, service_errors

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Workspace

# How a workspace's nodes may reach the internet: the name on the command line, and Azure ML's name.
NETWORKS = {
    "public": None,
    "internet-outbound": "AllowInternetOutbound",
    "approved-outbound": "AllowOnlyApprovedOutbound",
}


@dataclass(frozen=True, kw_only=True)
class WorkspaceRequest:
    """A workspace to create.

    Attributes:
        name: name of the workspace.
        region: region, such as `westeurope`. Clusters are created there too.
        description, display_name: texts on the workspace's page.
        high_business_impact: whether Azure collects less diagnostic data and nodes encrypt their local disks. It cannot
            be changed later.
        key, key_vault: URI of your own key, and resource id of the vault that holds it. They cannot be changed later.
        network: one of `NETWORKS`. `internet-outbound` and `approved-outbound` put nodes into a network that Azure ML
            manages; the second allows only approved outbound connections.
        public_access: whether the workspace answers requests from the internet. If not, use private endpoints.
        storage_account, container_registry, application_insights: resource ids of your own resources. With None, Azure
            ML creates one. Application Insights receives the diagnostics of deployed models.
        build_cluster: cluster that builds images if the registry is in a private network.
        identity_based_storage: whether each user's own rights give access to storage, in place of the account's key.
        tags: tags for the subscription's owner.
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
    """Describe the workspace as azure-ai-ml's entity, without a request to Azure."""
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


@service_errors()
def create_workspace(client: MLClient, workspace: Workspace) -> Workspace:
    """Create the workspace, and a storage account, key vault and Application Insights if none are given.

    Raises:
        JobError: a workspace of this name exists. It is not changed, because most settings cannot be changed later.
        ServiceError: the user has no permission, or a part of the workspace is not available.
    """
    from azure.core.exceptions import ResourceNotFoundError

    with suppress(ResourceNotFoundError):
        client.workspaces.get(str(workspace.name))
        raise JobError(
            f"There is a workspace {workspace.name} in this resource group: see `azureml-strategy workspace show`. "
            "Give another name to make another."
        )
    made: Workspace = client.workspaces.begin_create(workspace).result()
    return made


@service_errors()
def show_workspace(client: MLClient, name: str | None = None) -> Workspace:
    """Look up a workspace in its present state; by default the client's own.

    Raises:
        ServiceError: there is no workspace of this name.
    """
    found: Workspace = client.workspaces.get(name or client.workspace_name)
    return found


@service_errors()
def diagnose_workspace(client: MLClient, name: str | None = None) -> list[str]:
    """List the problems that Azure ML finds with a workspace's network, storage, registry and key vault, one per line.

    Raises:
        ServiceError: there is no workspace of this name, or Azure ML cannot diagnose it.
    """
    found = client.workspaces.begin_diagnose(name or client.workspace_name).result()
    results = [result for kind in vars(found).values() if isinstance(kind, list) for result in kind]
    return [f"{plain(result.level)}: {result.code}: {result.message}" for result in results]
