"""Gives Lightning the ranks and addresses of a launch."""

from __future__ import annotations

import logging
import os

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from typing_extensions import override

from azureml_strategy.cluster.environ import LaunchError, describe
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_ranks
from azureml_strategy.cluster.node_discovery import learn_launch

log = logging.getLogger(__name__)
# If one of these is set, by hand or by a launcher, there are other nodes.
_OTHER_NODES = ("MASTER_ADDR", "NODE_RANK", "GROUP_RANK")


class AzureMLEnvironment(LightningEnvironment):
    """The ranks and the main address that Azure ML gave this process.

    Our strategies create one. With a stock strategy, pass it yourself, together with the job's numbers:
    `Trainer(plugins=[AzureMLEnvironment()], strategy="fsdp", num_nodes=2, devices=8)`, and likewise for `Fabric`.

    The platform sets the ranks, and nothing else can. They change only if the job starts one process on each node and
    a strategy starts the others (`start_processes`).

    Outside a distributed job, as on a laptop, it is Lightning's own default environment. There `num_nodes=2` still
    means two nodes: Lightning computes ranks and each node's share of the data from it, so nothing here may take it
    for 1. It works on two machines that have MASTER_ADDR and NODE_RANK, as Lightning documents. Where neither is set
    there is no second node, and the launch is refused instead of waiting for it. `strategy="azureml_ddp"` without
    `num_nodes` runs in both places.

    Args:
        launch: this process's place in the job; by default from `learn_launch`.

    Raises:
        LaunchError: the launch's variables contradict one another.
    """

    def __init__(self, launch: Launch | None = None) -> None:
        super().__init__()
        self._launch = launch or learn_launch()
        self._starts_processes = False

    @property
    def in_job(self) -> bool:
        """Whether this process belongs to a distributed job."""
        return self._launch is not None

    @property
    def launch(self) -> Launch:
        """This process's place in the job.

        Raises:
            LaunchError: there is no distributed job.
        """
        if self._launch is None:
            raise LaunchError("This process is in no distributed Azure ML job: no launcher's variables are set.")
        return self._launch

    def start_processes(self, processes: int) -> None:
        """Give each node `processes` ranks. The job has started only the first of them."""
        self._launch = self.launch.with_local_processes(processes)
        self._starts_processes = True

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return not self._starts_processes if self.in_job else super().creates_processes_externally

    @property
    @override
    def main_address(self) -> str:
        return self.launch.main_address if self.in_job else super().main_address

    @property
    @override
    def main_port(self) -> int:
        return self.launch.main_port if self.in_job else super().main_port

    @staticmethod
    @override
    def detect() -> bool:
        return detect_ranks() is not None

    @override
    def world_size(self) -> int:
        return self.launch.world_size if self.in_job else super().world_size()

    @override
    def set_world_size(self, size: int) -> None:
        if not self.in_job:
            super().set_world_size(size)
        elif size != self.launch.world_size:
            log.debug("The job has %d processes; a world size of %d is ignored.", self.launch.world_size, size)

    @override
    def global_rank(self) -> int:
        return self.launch.rank if self.in_job else super().global_rank()

    @override
    def set_global_rank(self, rank: int) -> None:
        if not self.in_job:
            super().set_global_rank(rank)
        elif rank != self.launch.rank:
            log.debug("The job gave this process rank %d; rank %d is ignored.", self.launch.rank, rank)

    @override
    def local_rank(self) -> int:
        return self.launch.local_rank if self.in_job else super().local_rank()

    @override
    def node_rank(self) -> int:
        return self.launch.node_rank if self.in_job else super().node_rank()

    @override
    def teardown(self) -> None:
        if not self.in_job:  # Lightning's removes WORLD_SIZE, which the job has set
            super().teardown()

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the numbers of a Trainer or Fabric with the job's.

        Raises:
            LaunchError: they differ; or there is no job, and no variable shows a second node.
        """
        if not self.in_job:
            if num_nodes > 1 and not any(name in os.environ for name in _OTHER_NODES):
                raise LaunchError(
                    f"num_nodes={num_nodes}, but this process is in no distributed Azure ML job, and nothing tells of "
                    f"another node ({describe(os.environ, _OTHER_NODES)}): it would wait for ranks that nobody starts. "
                    "Leave num_nodes out and write strategy='azureml_ddp', which takes it from the job and is 1 "
                    "elsewhere; or set MASTER_ADDR and NODE_RANK on each of your machines."
                )
            return
        launch = self.launch
        if (num_nodes, num_devices) != (launch.num_nodes, launch.local_world_size):
            raise LaunchError(
                f"(num_nodes={num_nodes}, devices={num_devices}) wants {num_nodes * num_devices} processes, "
                f"but the job's `{launch.launcher}` launcher started {launch.world_size}: {launch.local_world_size} "
                f"on each of {launch.num_nodes} node(s). Give the Trainer or Fabric num_nodes={launch.num_nodes} and "
                f"devices={launch.local_world_size}, or leave both out with strategy='azureml_ddp'."
            )
