"""Stops a Fabric whose processes do not match those of the job."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.optim import Optimizer

from azureml_strategy.cluster.environ import GUARD_SWITCH
from azureml_strategy.cluster.guard import Processes, complete_launch, remedy
from azureml_strategy.cluster.isolation import Isolated
from azureml_strategy.cluster.launch import Launch, PartialLaunch
from azureml_strategy.lightning_internals import fabric_in_the_making


class FabricGuard(Isolated):
    """`LaunchGuard` for Fabric, which Lightning loads by the entry point `lightning.fabric.callbacks_factory`.

    It is no `lightning.pytorch.Callback`: `fabric.call` would call the hooks of one with arguments of the script's own.

    A Fabric with a parallel strategy is checked while it is made. Next it starts the processes, and if it is too large,
    it waits half an hour for the others. A Fabric with a single device may be meant for one rank, as to evaluate after
    a distributed training. It is refused when it sets up its first model, unless the process belongs to a group by
    then, and in any case when it steps an optimizer.

    Args:
        launch: this process's place in the job, as far as it is known before all processes meet.

    Raises:
        LaunchError: the Fabric that is being made does not match the job.
    """

    switch = GUARD_SWITCH

    def __init__(self, launch: Launch | PartialLaunch) -> None:
        self._known = launch
        fabric = fabric_in_the_making()
        processes = self._processes(fabric.strategy) if fabric is not None else None
        if processes is not None and not processes.alone:
            self._check(processes)

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        """Check what sets up a model; Fabric calls this in `setup`."""
        processes = self._processes(fabric.strategy)
        if not (processes.alone and dist.is_initialized()):
            self._check(processes)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Optimizer) -> None:
        """Check what trains: a model may have been set up by `setup_module`, which calls no callback."""
        self._check(self._processes(strategy))

    def _processes(self, strategy: Any) -> Processes:
        return Processes(strategy, "Fabric", remedy("Fabric"))

    def _check(self, processes: Processes) -> None:
        if processes.known:
            self._known = complete_launch(self._known)
            processes.check(self._known)
