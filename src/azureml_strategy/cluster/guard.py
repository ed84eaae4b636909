"""Stops a Trainer or a Fabric whose processes do not match those of the job."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.cluster.environ import GUARD_SWITCH, LaunchError, describe
from azureml_strategy.cluster.isolation import Isolated, IsolatedCallback
from azureml_strategy.cluster.launch import Launch, PartialLaunch
from azureml_strategy.cluster.node_discovery import learn_launch
from azureml_strategy.lightning_internals import MultiProcessingLauncher, fabric_in_the_making

log = logging.getLogger(__name__)


# LightningEnvironment reads these on several nodes. Without them it assumes a single node.
_LIGHTNING_READS = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
# The cluster environments of these packages read variables that the platform or Lightning has set.
_KNOWN_PACKAGES = ("lightning", "lightning_fabric", "azureml_strategy")
# A single process may do these alone. The names are Lightning's.
_EVALUATIONS = ("validate", "test", "predict")


class LaunchGuard(IsolatedCallback):
    """Stops a Trainer whose processes do not match the job's. Works with any strategy and either copy of Lightning.

    If `num_nodes` or `devices` is left out, stock Lightning silently trains alone in each process. If they are too
    large, it waits half an hour for ranks that nobody starts. The guard turns both into errors within seconds.
    Lightning loads it into every Trainer of a job through the entry points of this package:
    `lightning.pytorch.callbacks_factory`, and `pytorch_lightning.callbacks_factory` for the separate copy.

    Args:
        launch: this process's place in the job. If the number of nodes is unknown, the guard learns it from the other
            ranks when they are about to join the process group.
    """

    switch = GUARD_SWITCH

    def __init__(self, launch: Launch | PartialLaunch) -> None:
        self._known = launch
        self._warned = False

    @property
    def launch(self) -> Launch:
        """This process's place in the job.

        Raises:
            LaunchError: no variable gives the number of nodes, and the other ranks did not help.
        """
        self._known = complete_launch(self._known)
        return self._known

    @override
    def before_run(self, trainer: Trainer) -> None:
        self.check(trainer)  # in `setup`, a wrong world size already hangs

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.check(trainer)

    def check(self, trainer: Trainer) -> None:
        """Compare the Trainer's processes with the job's.

        One process may validate, test or predict alone, as Lightning itself advises after a distributed `fit`.

        Raises:
            LaunchError: their numbers differ, each process would start those of its node again, or the strategy reads
                ranks other than the job's.
        """
        processes = Processes(trainer.strategy, "Trainer", _remedy(trainer))
        if not processes.known or self._evaluates_alone(trainer, processes):
            return
        # `multiprocessing` gives the variables of a node's only process to all processes that it starts. So only the
        # first of them may ask for the number of nodes; it checks the same Trainer.
        starts_others = _forks(trainer.strategy.launcher)
        if not (isinstance(self._known, PartialLaunch) and starts_others and trainer.local_rank > 0):
            processes.check(self.launch)

    def _evaluates_alone(self, trainer: Trainer, processes: Processes) -> bool:
        if not processes.alone or trainer.state.fn is None or trainer.state.fn.value not in _EVALUATIONS:
            return False
        if self._known.rank == 1 and not self._warned:  # rank 0 may be the only one on purpose
            self._warned = True
            log.warning(
                "Rank 1 runs `%s` with a Trainer of its own process. If each of the job's %d ranks runs this line, "
                "they all do the same work. For one rank to do it, write `if trainer.is_global_zero:` above it, with "
                "the Trainer that has trained; to share it, write Trainer(strategy='azureml_ddp').",
                trainer.state.fn.value,
                self._known.world_size,
            )
        return True


def complete_launch(known: Launch | PartialLaunch) -> Launch:
    """Return the whole launch; ask the other ranks for the number of nodes if no variable gives it.

    Raises:
        LaunchError: the other ranks did not help.
    """
    launch = learn_launch() if isinstance(known, PartialLaunch) else known
    assert launch is not None
    return launch


@dataclass(frozen=True)
class Processes:
    """The processes that a Trainer's or Fabric's strategy counts on, to compare with the job's."""

    strategy: Any  # with the numbers that Lightning has given it
    maker: str  # `Trainer` or `Fabric`
    remedy: str  # what to type instead

    @property
    def num_nodes(self) -> int:
        """Nodes, as Lightning counts them; 1 for a strategy that knows of none."""
        return int(getattr(self.strategy, "num_nodes", 1))

    @property
    def devices(self) -> int:
        """Devices of a node, each with a process of its own. Fabric's `dp` serves several by one."""
        return len(self.strategy.parallel_devices or [None]) if hasattr(self.strategy, "num_nodes") else 1

    @property
    def environment(self) -> ClusterEnvironment | None:
        """Where the strategy reads its ranks; None for one of a single device."""
        return getattr(self.strategy, "cluster_environment", None)

    @property
    def known(self) -> bool:
        """Whether Lightning's cluster environments or ours give the ranks. Ray Train and others bring their own."""
        return self.environment is None or type(self.environment).__module__.partition(".")[0] in _KNOWN_PACKAGES

    @property
    def alone(self) -> bool:
        """Whether this process would work alone, without a launcher."""
        return self.num_nodes * self.devices == 1 and self.strategy.launcher is None

    def check(self, launch: Launch) -> None:
        """Compare them with the job's.

        Raises:
            LaunchError: the numbers differ, each process would start those of its node again, or the strategy reads
                ranks other than the job's.
        """
        if not self.known:
            return
        if launch.local_world_size > 1 and _forks(self.strategy.launcher):
            raise LaunchError(
                f"This {self.maker} starts {self.devices} processes by `multiprocessing`, and the job's "
                f"`{launch.launcher}` launcher has started {launch.local_world_size} process(es) on each node already: "
                f"each of these would start {self.devices} more, which collide. {self.remedy} Or keep the strategy, "
                "and set the job's process_count_per_instance to 1."
            )
        free = launch.local_world_size == 1 and self._starts_others()
        if self.num_nodes != launch.num_nodes or not (free or self.devices == launch.local_world_size):
            raise LaunchError(self._wrong_size(launch))
        if self.environment is not None and _is_lightnings(self.environment):
            self._check_lightning_environment(self.environment, launch)

    def _starts_others(self) -> bool:
        """Whether the strategy starts a node's other processes, or has started this one."""
        if _forks(self.strategy.launcher):
            return True
        environment = self.environment
        if environment is None or not environment.creates_processes_externally:
            return environment is not None
        # Lightning writes LOCAL_RANK when it starts processes. Once it is set, `creates_processes_externally` is true,
        # as if a launcher had started them.
        started = bool(getattr(self.strategy.launcher, "procs", None))
        return _is_lightnings(environment) and (started or environment.local_rank() > 0)

    def _wrong_size(self, launch: Launch) -> str:
        strategy = type(self.strategy).__name__
        world_size = self.num_nodes * self.devices
        fate = (
            "it would wait for ranks that nobody starts"
            if world_size > launch.world_size
            else "each group of that size would train alone on all the data"
        )
        return (
            f"This {self.maker} wants {world_size} process(es): num_nodes={self.num_nodes} x "
            f"devices={self.devices}, with {strategy}. The job's `{launch.launcher}` launcher started "
            f"{launch.world_size}: {launch.num_nodes} node(s) x {launch.local_world_size}; {fate}. "
            f"{self.remedy} For another strategy, "
            "set the job's process_count_per_instance to the devices of a node (it is "
            f"{launch.local_world_size}) and write {self.maker}(num_nodes={launch.num_nodes}, "
            f"devices={launch.local_world_size}). If this {self.maker} is meant to run alone in each process, "
            f"set {GUARD_SWITCH}=off."
        )

    def _check_lightning_environment(self, environment: ClusterEnvironment, launch: Launch) -> None:
        missing = launch.num_nodes > 1 and any(name not in os.environ for name in _LIGHTNING_READS)
        read = (environment.node_rank(), environment.local_rank())
        alone = launch.local_world_size == 1  # on its node, so Lightning started the further local ranks
        if missing or read[0] != launch.node_rank or not (alone or read[1] == launch.local_rank):
            raise LaunchError(
                f"The strategy reads node rank {read[0]} and local rank {read[1]} from Lightning's default "
                f"environment ({describe(os.environ, (*_LIGHTNING_READS, 'LOCAL_RANK'))}), but the job's "
                f"`{launch.launcher}` launcher gave this process node rank {launch.node_rank} and local rank "
                f"{launch.local_rank}: ranks would collide. Write {self.maker}(strategy='azureml_ddp') after `import "
                f"azureml_strategy`, or {self.maker}(plugins=[azureml_strategy.cluster.AzureMLEnvironment()])."
            )


def _remedy(trainer: Trainer) -> str:
    if type(trainer).__module__.partition(".")[0] == "pytorch_lightning":
        return (
            "Its class comes from `pytorch_lightning`, a separate copy of Lightning under which our strategies do not "
            "work. Write `from lightning.pytorch import Trainer`, likewise for LightningModule and callbacks, and "
            "Trainer(strategy='azureml_ddp') after `import azureml_strategy`."
        )
    return remedy("Trainer")


def remedy(maker: str) -> str:
    """Return what to type instead, for a `Trainer` or a `Fabric` of the `lightning` package."""
    return (
        f"Write {maker}(strategy='azureml_ddp') after `import azureml_strategy`: it takes both numbers from the job, "
        "and starts a process for each device of a node where the job started only one."
    )


def _is_lightnings(environment: ClusterEnvironment) -> bool:
    return type(environment).__name__ == "LightningEnvironment"  # ours is a subclass


def _forks(launcher: object) -> bool:
    """Whether the launcher starts a node's processes by `multiprocessing`, as with `ddp_spawn` and `ddp_notebook`."""
    # By name, because `pytorch_lightning` has its own copies of the classes.
    return any(each.__name__ == MultiProcessingLauncher.__name__ for each in type(launcher).__mro__)


class FabricGuard(Isolated):
    """`LaunchGuard` for Fabric, which Lightning loads by the entry point `lightning.fabric.callbacks_factory`.

    It is no `lightning.pytorch.Callback`: `fabric.call` would call the hooks of one with arguments of the script's own.

    A Fabric with a parallel strategy is checked while it is made. Next it starts the processes, and if it is too large,
    it waits half an hour for the others. A Fabric with a single device may be meant for one rank, as to evaluate after
    a distributed training. It is refused when it sets up its first model, unless the process belongs to a group by
    then, and in any case when it steps an optimizer.

    Raises:
        LaunchError: the Fabric that is being made does not match the job.
    """

    switch = GUARD_SWITCH

    def __init__(self, launch: Launch | PartialLaunch) -> None:
        self._known = launch
        fabric = fabric_in_the_making()
        if fabric is not None and not self._processes(fabric.strategy).alone:
            self._check(self._processes(fabric.strategy))

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
