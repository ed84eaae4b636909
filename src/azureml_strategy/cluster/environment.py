"""Gives Lightning the ranks and addresses of a launch."""

from __future__ import annotations

import logging

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from typing_extensions import override

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_ranks
from azureml_strategy.cluster.node_count import learn_launch

log = logging.getLogger(__name__)


class AzureMLEnvironment(ClusterEnvironment):
    """The ranks and the main address that Azure ML gave this process.

    Our strategies create one. With a stock strategy, pass it yourself, together with the job's numbers:
    `Trainer(plugins=[AzureMLEnvironment()], strategy="fsdp", num_nodes=2, devices=8)`.

    The platform sets the ranks, and nothing else can. They change only if the job starts one process on each node and
    a strategy starts the others (`start_processes`).

    Args:
        launch: this process's place in the job; by default from `learn_launch`.

    Raises:
        LaunchError: the environment holds no launch, or its variables contradict one another.
    """

    def __init__(self, launch: Launch | None = None) -> None:
        super().__init__()
        launch = launch or learn_launch()
        if launch is None:
            raise LaunchError(
                "AzureMLEnvironment was made outside a distributed Azure ML job: no launcher's variables are set. "
                "Leave the plugin out here, or use strategy='azureml_ddp', which works in both places."
            )
        self.launch = launch
        self._starts_processes = False

    def start_processes(self, processes: int) -> None:
        """Give each node `processes` ranks. The job has started only the first of them."""
        self.launch = self.launch.with_local_processes(processes)
        self._starts_processes = True

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return not self._starts_processes

    @property
    @override
    def main_address(self) -> str:
        return self.launch.main_address

    @property
    @override
    def main_port(self) -> int:
        return self.launch.main_port

    @staticmethod
    @override
    def detect() -> bool:
        return detect_ranks() is not None

    @override
    def world_size(self) -> int:
        return self.launch.world_size

    @override
    def set_world_size(self, size: int) -> None:
        if size != self.launch.world_size:
            log.debug("The job has %d processes; a world size of %d is ignored.", self.launch.world_size, size)

    @override
    def global_rank(self) -> int:
        return self.launch.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        if rank != self.launch.rank:
            log.debug("The job gave this process rank %d; rank %d is ignored.", self.launch.rank, rank)

    @override
    def local_rank(self) -> int:
        return self.launch.local_rank

    @override
    def node_rank(self) -> int:
        return self.launch.node_rank

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the Trainer's numbers with the job's.

        Raises:
            LaunchError: they differ.
        """
        launch = self.launch
        if (num_nodes, num_devices) != (launch.num_nodes, launch.local_world_size):
            raise LaunchError(
                f"Trainer(num_nodes={num_nodes}, devices={num_devices}) wants {num_nodes * num_devices} processes, "
                f"but the job's `{launch.launcher}` launcher started {launch.world_size}: {launch.local_world_size} "
                f"on each of {launch.num_nodes} node(s). Write Trainer(num_nodes={launch.num_nodes}, "
                f"devices={launch.local_world_size}), or leave both out with strategy='azureml_ddp'."
            )
