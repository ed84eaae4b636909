"""Clusters of GPU nodes: Azure ML's AmlCompute."""

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
    """A cluster to make.

    Attributes:
        vm_size: size of each node, in any case, with or without `Standard_`.
        max_nodes: nodes that jobs may have at a time.
        min_nodes: nodes that run, and cost, without a job.
        name: None: after the size and tier, which is where a job of that size looks for it.
        tier: `dedicated`, or `low_priority`: much cheaper, and taken away when Azure needs the nodes.
        idle_seconds: how long a node without a job is kept.
        region: None: the workspace's.
        vnet, subnet: name of the virtual network and of the subnet in it; or the subnet's resource id alone.
        public_ip: whether nodes have an address on the internet; without one they need the subnet, or a workspace
            with a managed network.
        identity: resource id of a user-assigned managed identity, or `system`; None: none.
        allow_ethernet: several nodes without InfiniBand are meant.
        tags: for the subscription's owner.
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
        if self.idle_seconds < 1:  # azure-ai-ml takes 0 for nothing said, and sends none
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
    """The cluster as azure-ai-ml's entity; nothing is asked of Azure.

    Raises:
        JobError: no such size, a retired one, or one without InfiniBand for several nodes that are not confirmed.
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


def create_cluster(client: MLClient, cluster: AmlCompute) -> AmlCompute:
    """Make the cluster, or change the one of this name; wait until it is ready.

    Raises:
        ServiceError: no quota, no permission, the size is not in the region, another compute has the name.
    """
    with service_errors():
        made: AmlCompute = client.compute.begin_create_or_update(cluster).result()
    if made.provisioning_state == "Failed":
        raise JobError(
            f"The cluster {made.name} was accepted, and then failed: {made.provisioning_errors or 'no reason given'}. "
            f"Delete it with `azureml-strategy cluster delete {made.name}`, and look at its page in Azure ML Studio."
        )
    return made


def show_cluster(client: MLClient, name: str) -> AmlCompute:
    """The cluster as it is now.

    Raises:
        ServiceError: there is none of this name.
    """
    with service_errors():
        found: AmlCompute = client.compute.get(name)
    return found


def list_clusters(client: MLClient) -> list[AmlCompute]:
    """Every cluster of the workspace."""
    with service_errors():
        return list(client.compute.list(compute_type="amlcompute"))


def delete_cluster(client: MLClient, name: str) -> None:
    """Delete the cluster and wait until it is gone; jobs on it are ended.

    Raises:
        ServiceError: there is none of this name, or it is not yours to delete.
    """
    with service_errors():
        client.compute.get(name)  # a delete of nothing succeeds, and the misspelt cluster would go on costing
        client.compute.begin_delete(name).result()
