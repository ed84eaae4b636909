"""Base of all our strategies: processes, ranks and devices come from the launch.

It also warns at the start of modules that would train in evaluation mode, and makes the schedulers of all ranks follow
one value.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from azureml_strategy.cluster.environ import PRETEND_VARIABLE, LaunchError
from azureml_strategy.cluster.environment import AzureMLEnvironment
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.node_discovery import learn_launch
from azureml_strategy.control.gather import gather
from azureml_strategy.huggingface.checkpoints import RecordsModels
from azureml_strategy.huggingface.loading import Loading, Way, loading_as
from azureml_strategy.interfaces import ALL_RANKS
from azureml_strategy.lightning_internals import (
    accumulates,
    default_process_group_backend,
    follow_together,
    is_interactive,
    log_in_place,
)
from azureml_strategy.network.record import RunNetwork
from azureml_strategy.network.session import prepare_network
from azureml_strategy.strategies.averages import keep_averages, warn_of_rounded_averages
from azureml_strategy.strategies.compilation import Compilation, Compile
from azureml_strategy.strategies.deepspeed_internals import is_of_zero
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.launcher import NodeLauncher
from azureml_strategy.strategies.mixed_precision import NORM_WITH_STATISTICS
from azureml_strategy.strategies.process_group import note_failure, own_process_group
from azureml_strategy.strategies.reduction import reduce_over_ranks
from azureml_strategy.strategies.true_precision import builds_tables, end_precise, keep_precise

# How many names a warning lists.
_SHOWN = 4

# The network of this process's group. A later Trainer in the same process uses the same group.
_networks: dict[str, RunNetwork] = {}


def warn_of_evaluation_modes(module: LightningModule) -> None:
    """Warn of parts in evaluation mode whose parameters an optimizer has. Nothing is changed: it may be intended.

    `from_pretrained` of transformers leaves a model in this mode, and Lightning keeps the modes of a module: the model
    would train without dropout and without activation checkpointing.
    """
    found = list(trained_in_evaluation_mode(module))
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        rank_zero_warn(
            f"{', '.join(found[:_SHOWN])}{more} will train in evaluation mode, without dropout and without activation "
            "checkpointing. from_pretrained of transformers leaves a model so. Call its train() in configure_model, or "
            "load it by azureml_strategy.huggingface.load_pretrained; if it is meant, ignore this."
        )


def trained_in_evaluation_mode(module: LightningModule) -> Iterator[str]:
    """Yield the names of the outermost parts in evaluation mode with parameters that train.

    Frozen parts are not among them, nor models that no optimizer has, such as teachers, nor normalisations that keep
    their statistics.
    """
    own = {id(each) for each in module.parameters() if each.requires_grad}
    groups = (group for optimizer in module.trainer.optimizers for group in optimizer.param_groups)
    held = {id(each) for group in groups for each in group["params"]}
    # DeepSpeed's optimizers hold other tensors instead of the parameters, and mark those parameters.
    trained = own & (held | {id(each) for each in module.parameters() if is_of_zero(each)}) or own
    inside: set[nn.Module] = set()
    for name, part in module.named_modules():
        if part in inside or part.training or isinstance(part, NORM_WITH_STATISTICS):
            continue
        inside |= set(part.modules())
        layers = (layer for layer in part.modules() if not isinstance(layer, NORM_WITH_STATISTICS))
        if any(id(parameter) in trained for layer in layers for parameter in layer.parameters(recurse=False)):
            yield name or type(module).__name__


def average_monitored_values(trainer: Trainer) -> None:
    """Make ReduceLROnPlateau on all ranks follow the mean over the ranks.

    Lightning gives each the value that its own rank has logged. Without `sync_dist=True` the learning rates diverge,
    and with them the models. A value that is the same on all ranks stays as it is, to the last bit.
    """
    if trainer.state.fn == TrainerFn.FITTING and trainer.world_size > 1:
        follow_together(trainer, _mean_of_ranks)


def _mean_of_ranks(value: Any) -> Any:
    """Return the mean over the ranks that have logged a value; a collective, which Lightning calls on all ranks."""
    logged = [each for each in gather(None if value is None else float(value)) if each is not None]
    if value is None and not logged:
        return None
    if len(set(logged)) == 1 and value is not None:
        return value
    mean = sum(logged) / len(logged)
    return value.new_tensor(mean) if isinstance(value, Tensor) else mean


class LaunchedProcesses:
    """Mix-in before a parallel strategy of Lightning's, the Trainer's or Fabric's.

    In a job, `num_nodes` and `devices` follow the launch. Lightning tells a strategy the numbers of its Trainer or
    Fabric, but not whether the user typed them. If not, it passes 1 node, and 1 CPU process or all visible GPUs. So the
    launch overrides these values, and any other number must agree with it. Outside a job nothing changes.

    Args:
        cluster_environment: replaces the environment that the job's launch gives.
        require_infiniband: stop a multi-node job unless NCCL carries it over InfiniBand, instead of warning.
        kwargs: the wrapped strategy's own arguments.
    """

    made_by: ClassVar[str] = "Trainer"
    launcher_class: ClassVar[type[NodeLauncher]] = NodeLauncher
    # Lightning's strategies each define these attributes themselves.
    root_device: torch.device
    _launcher: Any
    _num_nodes: int
    _parallel_devices: list[torch.device] | None
    _process_group_backend: str | None
    _timeout: timedelta | None
    # The job's environment, while it is still open whether the user has given another one.
    _withheld: AzureMLEnvironment | None = None
    _cluster_environment: ClusterEnvironment | None

    def __init__(
        self, *, cluster_environment: ClusterEnvironment | None = None, require_infiniband: bool = False, **kwargs: Any
    ) -> None:
        if cluster_environment is None:
            launch = learn_launch(kwargs.get("timeout"))
            cluster_environment = AzureMLEnvironment(launch) if launch else None
        self._job_environment = _of_job(cluster_environment)
        self._require_infiniband = require_infiniband
        super().__init__(**kwargs)
        # Set it here: ModelParallelStrategy has no such argument, and the other strategies would only store it.
        self.cluster_environment = cluster_environment

    def prefer_plugins(self) -> None:
        """Let the user replace the cluster environment: `Trainer(strategy="ddp", plugins=[environment])`.

        Lightning gives a strategy the environment of `plugins`, or its own, only if the strategy has none.
        """
        self._withheld, self._cluster_environment = self._job_environment, None

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Where ranks and addresses come from."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        if self._withheld is not None:
            environment = self._withheld if _is_lightnings(environment) else environment
            self._job_environment, self._withheld = _of_job(environment), None
        self._cluster_environment = environment

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """One device for each process of a node."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and self._job_environment is not None:
            devices = self._devices_of_launch(self._job_environment, devices)
        self._parallel_devices = devices

    @property
    def num_nodes(self) -> int:
        """Nodes in the job; outside a job, the argument of the Trainer or Fabric."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if self._job_environment is not None:
            job_nodes = self._job_environment.launch.num_nodes
            if num_nodes not in (1, job_nodes):
                raise LaunchError(
                    f"{self.made_by}(num_nodes={num_nodes}), but the job has {job_nodes} node(s), as its "
                    f"`{self._job_environment.launch.launcher}` launcher says. Leave num_nodes out, or set the "
                    f"job's `resources.instance_count` to {num_nodes}."
                )
            num_nodes = job_nodes
        self._num_nodes = num_nodes

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        assert self.parallel_devices is not None
        self._launcher = None
        if not is_interactive():
            self._launcher = self.launcher_class(self.cluster_environment, len(self.parallel_devices), self.num_nodes)
        elif self._must_start_processes():
            raise ConfigurationError(self._no_script(len(self.parallel_devices)))

    def _must_start_processes(self) -> bool:
        """Whether this process must start others. If not, Lightning needs no launcher, and a notebook allows none."""
        assert self.cluster_environment is not None
        assert self.parallel_devices is not None
        return len(self.parallel_devices) > 1 and not self.cluster_environment.creates_processes_externally

    def _no_script(self, devices: int) -> str:
        remedy = (
            "write strategy='azureml_ddp', which forks this process; or devices=1"
            if self._job_environment is None
            else f"set the job's `process_count_per_instance` to {devices}"
        )
        return (
            f"{type(self).__name__} starts the processes of {devices} devices by running the script again, but this is "
            f"a notebook or an interactive session, which has none. Put the training into a script; or {remedy}."
        )

    def setup_environment(self) -> None:
        """Start the process group, in a job on the network that its nodes have."""
        if dist.is_initialized() and dist.get_world_size() != self.world_size:  # type: ignore[attr-defined]
            # Lightning would use it. After a training on one device, each process that a notebook forks inherits it.
            raise ConfigurationError(
                f"This {self.made_by} has {self.world_size} processes, but this one is in a process group of "  # type: ignore[attr-defined]
                f"{dist.get_world_size()} from an earlier training. In a notebook, restart the kernel; in a script, "
                "call torch.distributed.destroy_process_group() before."
            )
        # Lightning validates only if it starts the processes itself, and never for FSDP.
        if self._job_environment is not None:
            assert self.parallel_devices is not None
            self._job_environment.validate_settings(len(self.parallel_devices), self.num_nodes)
        if dist.is_initialized():
            super().setup_environment()  # type: ignore[misc]
            note_failure(failed=False)
            return
        try:
            # A pretended rank has no others to wait for, and no network.
            if self._job_environment is not None and PRETEND_VARIABLE not in os.environ:
                self._start_on_network(self._job_environment.launch)
            else:
                super().setup_environment()  # type: ignore[misc]
        finally:
            if dist.is_initialized():
                own_process_group()

    @property
    def network(self) -> RunNetwork | None:
        """The network that carries the job's traffic, and its settings; None except on rank 0 of a started job."""
        return _networks.get("run") if self._job_environment is not None else None

    def _start_on_network(self, launch: Launch) -> None:
        """Set up the network, start the process group on it, and observe which transport carries the traffic."""
        backend = self._process_group_backend or default_process_group_backend(self.root_device)
        timeout = self._timeout or default_pg_timeout
        session = prepare_network(launch, backend, timeout, require_infiniband=self._require_infiniband)
        super().setup_environment()  # type: ignore[misc]
        if backend == "nccl":
            # NCCL connects at the first collective, and only then is there a transport to observe.
            dist.all_reduce(torch.zeros(1, device=self.root_device))
            torch.cuda.synchronize(self.root_device)
        network = session.observe()
        if network is not None:
            _networks["run"] = network
            rank_zero_info(network.line)
            for warning in network.warnings:
                rank_zero_warn(warning)

    def _devices_of_launch(self, environment: AzureMLEnvironment, devices: list[torch.device]) -> list[torch.device]:
        """Return one device for each process of a node."""
        processes, asked = environment.launch.local_world_size, len(devices)
        if asked == processes:
            return devices
        if processes == 1:
            environment.start_processes(asked)
            return devices
        if devices[0].type == "cpu" and asked == 1:
            return devices * processes
        if devices[0].type == "cuda" and asked == torch.cuda.device_count():
            if asked > processes:
                return devices[:processes]
            if asked == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
                return devices * processes  # the platform shows each process only its own GPU
        raise LaunchError(
            f"{self.made_by}(devices={asked}) on `{devices[0].type}`, but the job's `{environment.launch.launcher}` "
            f"launcher started {processes} processes on each node, and each needs a device. Leave devices out or write "
            f"devices={processes}; or set the job's `process_count_per_instance` to {asked}."
        )


class LaunchedStrategy(LaunchedProcesses, RecordsModels, ParallelStrategy):
    """`LaunchedProcesses` for the Trainer's strategies, with checkpoints that a restart and transformers can load.

    Args:
        compile: `blocks`, `whole` or `off`, see `azureml_strategy.strategies.compilation`.
        compile_mode: of torch.compile; None for its default.
        kwargs: of `LaunchedProcesses` and the wrapped strategy.
    """

    trains_several_types: ClassVar[bool] = False
    """Whether weights in 16 bits can train beside others in float32. DeepSpeed and FSDP2 need one type."""
    keeps_addresses: ClassVar[bool] = False
    """Whether parameters stay where they are in memory, as CUDA graphs need it. Sharded ones are gathered anew."""

    def __init__(
        self,
        *,
        compile: Compile | bool | None = "off",  # noqa: A002 - torch's word for it
        compile_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._compilation = Compilation(compile, compile_mode)
        if self._compilation.replays_graphs and not self.keeps_addresses:
            raise ConfigurationError(
                f"compile_mode={compile_mode!r} replays CUDA graphs, which need each parameter at one address, and "
                f"{type(self).__name__} moves them. Leave compile_mode out, or use strategy='azureml_ddp'."
            )
        super().__init__(**kwargs)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.lightning_module is not None:
            average_monitored_values(self.lightning_module.trainer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._compilation.explain(exception)
        # All ranks stop at SIGTERM together. Any other error may be this rank's alone.
        note_failure(failed=not isinstance(exception, SIGTERMException))

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            precision_plugin = self.adapt_precision(precision_plugin)
            keep_precise(precision_plugin, self._keeps_statistics, self.trains_several_types)
        self._precision_plugin = precision_plugin

    def adapt_precision(self, plugin: Precision) -> Precision:
        """Return the plugin that the strategy uses in the place of the given one, or that one."""
        return plugin

    @override
    def setup(self, trainer: Trainer) -> None:
        keep_averages(trainer, self.precision_plugin.precision)
        log_in_place(trainer)
        super().setup(trainer)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        warn_of_evaluation_modes(self.lightning_module)
        warn_of_rounded_averages(self.lightning_module.trainer.callbacks, self.lightning_module)  # type: ignore[attr-defined]
        if self._compilation.is_on:
            self._compilation.refuse(self.lightning_module.trainer)
            networks, says = self.trained_networks(), self.local_rank == 0
            self._compilation.start(self.lightning_module, networks, says, self.world_size)

    @property
    def is_compiling(self) -> bool:
        """Whether parts of the module are compiled while it is fitted."""
        return self._compilation.is_on

    @property
    def replays_graphs(self) -> bool:
        """Whether they replay CUDA graphs, where there is a GPU."""
        return self._compilation.is_on and self._compilation.replays_graphs

    def trained_networks(self) -> Iterable[nn.Module]:
        """Return what of the module this rank calls, to be compiled."""
        assert self.lightning_module is not None
        return [self.lightning_module]

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._compilation.before_batch(training=True)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._compilation.before_batch(training=False)
        return super().validation_step(*args, **kwargs)

    def _keeps_statistics(self) -> bool:
        # sync_batchnorm=True replaces the layers later, by layers that cannot have weights of another type
        return self._layer_sync is None

    @override
    def teardown(self) -> None:
        self._compilation.stop()
        super().teardown()
        end_precise(self.precision_plugin)

    @property
    def loads_pretrained(self) -> Way:
        """How `load_pretrained` loads the weights of a model of transformers in `configure_model`."""
        return "broadcast" if self.world_size > 1 else "whole"

    @property
    def alike(self) -> int:
        """How many ranks compute each sample together, and so log the same values."""
        return 1

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduce a tensor over the ranks, as `reduce_over_ranks` does; `self.log(..., sync_dist=True)` comes here.

        `sum` counts ranks that compute a sample together once, so that it is the sum over the data. To count each rank,
        give torch.distributed's `ReduceOp.SUM`, or a group.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        over_data = group is None and isinstance(reduce_op, str) and reduce_op.lower() == "sum"
        return reduce_over_ranks(tensor, group, reduce_op, self.alike if over_data else 1)

    def reduce_as_gradients(self, tensor: Tensor) -> Tensor:
        """Average a tensor over the ranks whose gradients are averaged in this step."""
        return cast(Tensor, self.reduce(tensor))

    def ends_step(self) -> bool:
        """Whether the optimizer steps after the backward pass of this batch."""
        assert self.lightning_module is not None
        return not accumulates(self.lightning_module.trainer)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients of a step by a number that is the same on all ranks, in `on_after_backward`."""
        assert self.lightning_module is not None
        for parameter in self.lightning_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @property
    def copies(self) -> str | None:
        """The ranks that hold the same module as this one, see `SharesCopies`."""
        return ALL_RANKS

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        loading = Loading(self.loads_pretrained, self.root_device, self.precision_plugin.precision)
        with (
            loading_as(loading),
            super().tensor_init_context(empty_init),
            builds_tables(self.precision_plugin),
        ):
            yield


def _of_job(environment: ClusterEnvironment | None) -> AzureMLEnvironment | None:
    return environment if isinstance(environment, AzureMLEnvironment) and environment.in_job else None


def _is_lightnings(environment: ClusterEnvironment | None) -> bool:
    """Whether Lightning may have chosen the environment itself, by variables. It knows none of Azure ML's."""
    return type(environment).__module__.partition(".")[0] == "lightning"
