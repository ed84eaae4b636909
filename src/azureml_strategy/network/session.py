"""Sets up the network before the process group starts, and reads back what it uses after the first collective."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.control.rendezvous import open_store
from azureml_strategy.control.roll_call import call_roll
from azureml_strategy.network.nccl import (
    NetworkPlan,
    configured_settings,
    log_folder,
    own_log,
    plan_nccl,
    recorder_settings,
)
from azureml_strategy.network.nccl_log import Transport, read_transport
from azureml_strategy.network.node import Node, read_node
from azureml_strategy.network.record import NodeRecord, RunNetwork, record_node
from azureml_strategy.network.sysfs import cuda_started

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# Enough for every node to read a log of some megabytes.
_RECORD_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class NetworkSession:
    """One process's part in setting up and proving the network. `prepare_network` creates it."""

    launch: Launch
    backend: str
    node: Node
    plan: NetworkPlan  # already applied
    store: Store  # of the rendezvous
    require_infiniband: bool  # whether a fallback from InfiniBand stops the run

    def observe(self) -> RunNetwork | None:
        """Read back what carried the first collective. Every process must call this after that collective.

        Returns:
            The network of the run on rank 0; None on other ranks.

        Raises:
            LaunchError: InfiniBand is required but a node does not use it. Every process raises the same error.
        """
        if self.launch.local_rank == 0:
            record = record_node(self.launch, socket.gethostname(), self.node, self.plan, self._transport())
            self.store.set(f"node/{self.launch.node_rank}", record.to_json())
        network = RunNetwork(self.backend, self._collect_records()) if self.launch.rank == 0 else None
        if self.require_infiniband:
            if network is not None:
                self.store.set("fallen_back", _missing_infiniband(network, self.launch.num_nodes) or "")
            error = self.store.get("fallen_back").decode()
            if error:
                raise LaunchError(error)
        return network

    def _transport(self) -> Transport | str:
        """What carries the traffic. If no log can be read, say so in words: a diagnostic must not stop training."""
        if self.backend != "nccl":
            interface = self.plan.effective.get("GLOO_SOCKET_IFNAME")
            return f"sockets on {interface}" if interface else "sockets"
        try:
            return read_transport(own_log(self.plan.effective))
        except (LookupError, OSError) as error:
            return str(error)

    def _collect_records(self) -> list[NodeRecord]:
        from torch.distributed import DistError

        keys = [f"node/{node_rank}" for node_rank in range(self.launch.num_nodes)]
        try:
            self.store.wait(keys, _RECORD_TIMEOUT)
        except DistError:
            keys = [key for key in keys if self.store.check([key])]
        return [NodeRecord.from_json(self.store.get(key)) for key in keys]


def prepare_network(
    launch: Launch, backend: str, timeout: timedelta, *, require_infiniband: bool = False
) -> NetworkSession:
    """Plan and apply this node's settings, and wait until every process of the job has arrived.

    Call this before the process group starts, and `observe` after its first collective. `require_infiniband` matters
    in a job of several nodes only.

    Raises:
        LaunchError: processes are missing, or InfiniBand is required but some node cannot use it. Every process raises
            the same error.
    """
    node = read_node()
    plan = _plan(node, launch, backend)
    plan.apply()
    require_infiniband = require_infiniband and launch.num_nodes > 1
    store = open_store(launch, timeout)
    call_roll(store, launch, timeout, _obstacle(node, plan, backend) if require_infiniband else None)
    return NetworkSession(launch, backend, node, plan, store, require_infiniband)


def _plan(node: Node, launch: Launch, backend: str) -> NetworkPlan:
    is_nccl = backend == "nccl"
    folder = log_folder(node.azure) if is_nccl else None
    plan = plan_nccl(node, num_nodes=launch.separate_machines, log_folder=folder)
    plan = (plan if is_nccl else plan.for_gloo()).including(recorder_settings(configured_settings(), folder))
    # Once started, CUDA ignores this variable; but child processes would read it and number the GPUs differently.
    return plan.without("CUDA_DEVICE_ORDER") if is_nccl and cuda_started() else plan


def _obstacle(node: Node, plan: NetworkPlan, backend: str) -> str | None:
    """Why this process cannot have InfiniBand, or cannot prove it."""
    required = "require_infiniband=True, but"
    if backend != "nccl":
        return f"{required} the backend is {backend}, which uses sockets. Train on GPUs, or leave it out."
    if not plan.infiniband:
        findings = " ".join(str(finding) for finding in plan.findings)
        size = f" ({node.vm_size_name})" if node.vm_size_name else ""
        return f"{required} this node{size} has no InfiniBand to use. {findings}".rstrip()
    try:
        own_log(plan.effective)
    except LookupError as error:
        return f"{required} the transport would be {error}"
    return None


def _missing_infiniband(network: RunNetwork, num_nodes: int) -> str | None:
    """The error for all processes if some node does not use InfiniBand; None if all do."""
    if len(network.nodes) < num_nodes:
        return f"require_infiniband=True, but only {len(network.nodes)} of {num_nodes} nodes told their transport."
    fallen = [node for node in network.nodes if node.kind != "ib"]
    if not fallen:
        return None
    return (
        f"require_infiniband=True, but NCCL does not use it on {', '.join(node.host for node in fallen)}: "
        f"{' '.join([f'{fallen[0].summary}.', *fallen[0].complaints()])}"
    )
