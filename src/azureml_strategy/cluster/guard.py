"""No Trainer of a job trains alone by accident."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from azureml_strategy.cluster.errors import GUARD_SWITCH, LaunchError, seen
from azureml_strategy.cluster.isolation import IsolatedCallback
from azureml_strategy.cluster.launch import Launch

# What LightningEnvironment reads on several nodes; without them it assumes node 0 of one machine.
_LIGHTNING_READS = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


class LaunchGuard(IsolatedCallback):
    """Stops a Trainer whose processes are not the job's, whatever its strategy.

    Stock Lightning trains alone in each process, without a word, when `num_nodes` or `devices` is left out; it
    waits half an hour for ranks that nobody starts when they are too large. Both are errors here, within seconds.
    Lightning loads the guard into every Trainer of a job through the `lightning.pytorch.callbacks_factory` entry
    point of this package.

    Args:
        launch: this process's place in the job.
    """

    switch = GUARD_SWITCH

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    @property
    def log(self) -> Callable[..., None]:
        """The module's `log`, which the Trainer gives to every callback."""
        return self._log

    @log.setter
    def log(self, log: Callable[..., None]) -> None:
        # A Trainer hands out `log` just before it joins the process group, and calls `setup` only after: by then
        # a wrong world size hangs. No hook lies in between, so the check runs here; `setup` repeats it in case a
        # later Lightning hands it out at another time.
        self._log = log
        module: Any = getattr(log, "__self__", None)
        if isinstance(module, LightningModule):
            self.check(module.trainer)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.check(trainer)

    def check(self, trainer: Trainer) -> None:
        """Compare the Trainer's processes with the job's.

        Raises:
            LaunchError: they differ in number, or the strategy reads other ranks than the job gave.
        """
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if not _is_known(environment):
            return
        devices = trainer.num_devices
        free = self.launch.local_world_size == 1 and self._starts_others(trainer)
        if trainer.num_nodes != self.launch.num_nodes or not (free or devices == self.launch.local_world_size):
            raise LaunchError(self._wrong_size(trainer))
        if isinstance(environment, LightningEnvironment):
            self._check_lightning_environment(environment)

    def _starts_others(self, trainer: Trainer) -> bool:
        """Whether the strategy starts a node's other processes, or this is one that it started."""
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if environment is None or not environment.creates_processes_externally:
            return environment is not None
        # Lightning writes LOCAL_RANK when it starts them, and reads it as a sign of processes that others started.
        started = bool(getattr(trainer.strategy.launcher, "procs", None))
        return isinstance(environment, LightningEnvironment) and (started or environment.local_rank() > 0)

    def _wrong_size(self, trainer: Trainer) -> str:
        launch, strategy = self.launch, type(trainer.strategy).__name__
        world_size = trainer.num_nodes * trainer.num_devices
        fate = (
            "it would wait for ranks that nobody starts"
            if world_size > launch.world_size
            else "each group of that size would train alone on all the data"
        )
        return (
            f"This Trainer wants {world_size} process(es): num_nodes={trainer.num_nodes} x "
            f"devices={trainer.num_devices}, with {strategy}. The job's `{launch.launcher}` launcher started "
            f"{launch.world_size}: {launch.num_nodes} node(s) x {launch.local_world_size}; {fate}. "
            "Write Trainer(strategy='azureml_ddp') after `import azureml_strategy`: it takes both numbers from the "
            "job, and starts a process for each device of a node where the job started only one. For another "
            "strategy, set the job's process_count_per_instance to the devices of a node (it is "
            f"{launch.local_world_size}) and write Trainer(num_nodes={launch.num_nodes}, "
            f"devices={launch.local_world_size}). If this Trainer is meant to run alone in each process, "
            f"set {GUARD_SWITCH}=off."
        )

    def _check_lightning_environment(self, environment: LightningEnvironment) -> None:
        launch = self.launch
        missing = launch.num_nodes > 1 and any(name not in os.environ for name in _LIGHTNING_READS)
        read = (environment.node_rank(), environment.local_rank())
        alone = launch.local_world_size == 1  # on its node, so further local ranks are Lightning's own
        if missing or read[0] != launch.node_rank or not (alone or read[1] == launch.local_rank):
            raise LaunchError(
                f"The strategy reads node rank {read[0]} and local rank {read[1]} from Lightning's default "
                f"environment ({seen(os.environ, (*_LIGHTNING_READS, 'LOCAL_RANK'))}), but the job's "
                f"`{launch.launcher}` launcher gave this process node rank {launch.node_rank} and local rank "
                f"{launch.local_rank}: ranks would collide. Write Trainer(strategy='azureml_ddp') after `import "
                "azureml_strategy`, or Trainer(plugins=[azureml_strategy.cluster.AzureMLEnvironment()])."
            )


def _is_known(environment: ClusterEnvironment | None) -> bool:
    """Whether the ranks come from Lightning's environments or ours; Ray Train and others bring their own."""
    return environment is None or type(environment).__module__.partition(".")[0] in ("lightning", "azureml_strategy")
