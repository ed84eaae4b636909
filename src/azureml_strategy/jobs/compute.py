"""Creates, shows and deletes clusters of GPU nodes: Azure ML's AmlCompute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from azureml_strategy.jobs.client import check_resource_id, quiet_sdk
from azureml_strategy.jobs.resources import TIERS, check_nodes, compute_name, find_size
from azureml_strategy.jobs.service_errors import JobError, service_errors

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import AmlCompute, IdentityConfiguration


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """A cluster to create.

    Attributes:
        vm_size: VM size of each node, in any case, with or without `Standard_`.
        max_nodes: most nodes at a time.
        min_nodes: nodes that run, and cost, without a job.
        name: name of the cluster. None derives it from size and tier: jobs of that size look for this name.
        tier: `dedicated`, or `low_priority`: much cheaper, but Azure preempts the nodes when it needs them.
        idle_seconds: seconds for which a node without a job is kept.
        region: region of the cluster. None is the workspace's.
        vnet, subnet: names of the virtual network and of its subnet, or the subnet's resource id alone.
        public_ip: whether nodes have an address on the internet. Without one they need the subnet, or a workspace
            with a managed network.
        identity: resource id of a user-assigned managed identity, or `system`. None gives no identity.
        allow_ethernet: whether several nodes without InfiniBand are allowed.
        tags: tags for the subscription's owner.
    """

    vm_size: str
    max_nodes: int = 1
    min_nodes: int = 0
    name: str | None = None
    tier: str = "dedicated"
    idle_seconds: int = 300
    region: str | None = None
    vnet: str | None = None
    subnet: str | None = None
    public_ip: bool = True
    identity: str | None = None
    allow_ethernet: bool = False
    tags: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_nodes <= self.max_nodes or self.max_nodes < 1:
            raise JobError(
                f"A cluster of {self.min_nodes} to {self.max_nodes} nodes cannot be: --max-nodes is at least 1, and "
                "--min-nodes from 0 to --max-nodes."
            )
        if self.tier not in TIERS:
            raise JobError(f"There is no tier {self.tier!r}. Type --tier {' or --tier '.join(TIERS)}.")
        if self.idle_seconds < 1:  # azure-ai-ml treats 0 as not given, and sends nothing
            raise JobError(f"--idle-seconds is {self.idle_seconds}. Give the seconds, 1 or more.")
        if self.vnet and not self.subnet:
            raise JobError(f"--vnet {self.vnet} does not say which of its subnets: add --subnet NAME.")
        if self.subnet and not self.vnet and "/" not in self.subnet:
            raise JobError(f"--subnet {self.subnet} does not say in which network: add --vnet NAME, or give its id.")
        if self.subnet and not self.vnet:
            check_resource_id("--subnet", self.subnet)
        if self.identity != "system":
            check_resource_id("--identity", self.identity)


def render_cluster(request: ClusterRequest) -> AmlCompute:
    """Describe the cluster as azure-ai-ml's entity, without a request to Azure.

    Raises:
        JobError: the size is unknown or retired, or the user has not confirmed several nodes without InfiniBand.
    """
    size = find_size(request.vm_size)
    check_nodes(size, request.max_nodes, allowed=request.allow_ethernet, option="--allow-ethernet")
    quiet_sdk()
    from azure.ai.ml.entities import AmlCompute, NetworkSettings

    network = NetworkSettings(vnet_name=request.vnet, subnet=request.subnet) if request.subnet else None
    return AmlCompute(
        name=request.name or compute_name(size, request.tier),
        size=size.name,
        tier=request.tier,
        min_instances=request.min_nodes,
        max_instances=request.max_nodes,
        idle_time_before_scale_down=request.idle_seconds,
        location=request.region,
        network_settings=network,
        enable_node_public_ip=request.public_ip,
        ssh_public_access_enabled=False,
        identity=_identity(request.identity),
        tags=request.tags,
    )


def _identity(identity: str | None) -> IdentityConfiguration | None:
    from azure.ai.ml.entities import IdentityConfiguration, ManagedIdentityConfiguration

    if identity is None:
        return None
    if identity == "system":
        return IdentityConfiguration(type="system_assigned")
    assigned = ManagedIdentityConfiguration(resource_id=identity)
    return IdentityConfiguration(type="user_assigned", user_assigned_identities=[assigned])


@service_errors()
def create_cluster(client: MLClient, cluster: AmlCompute) -> AmlCompute:
    """Create the cluster, or change the one of this name, and wait until it is ready.

    Raises:
        JobError: Azure accepted the cluster and then failed to create it.
        ServiceError: there is no quota or permission, the region lacks the size, or another compute has the name.
    """
    made: AmlCompute = client.compute.begin_create_or_update(cluster).result()
    if made.provisioning_state == "Failed":
        raise JobError(
            f"The cluster {made.name} was accepted, and then failed: {made.provisioning_errors or 'no reason given'}. "
            f"Delete it with `azureml-strategy cluster delete {made.name}`, and look at its page in Azure ML Studio."
        )
    return made


@service_errors()
def show_cluster(client: MLClient, name: str) -> AmlCompute:
    """Look up the cluster in its present state.

    Raises:
        ServiceError: there is no cluster of this name.
    """
    found: AmlCompute = client.compute.get(name)
    return found


@service_errors()
def list_clusters(client: MLClient) -> list[AmlCompute]:
    """List the clusters of the workspace."""
    return list(client.compute.list(compute_type="amlcompute"))


@service_errors()
def delete_cluster(client: MLClient, name: str) -> None:
    """Delete the cluster, end the jobs on it, and wait until it is gone.

    Raises:
        ServiceError: there is no cluster of this name, or you may not delete it.
    """
    client.compute.get(name)  # deleting a misspelt name succeeds, and the real cluster goes on costing
    client.compute.begin_delete(name).result()
