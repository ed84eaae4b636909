"""Fabric's strategies with processes from the job: DDP, ZeRO, and FSDP2 with tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.huggingface.loading import Loading, loading_as
from azureml_strategy.strategies.changing_parameters import CompletingDDP
from azureml_strategy.strategies.deepspeed_internals import drop_stale_gradients, forget_gradients, zero_init
from azureml_strategy.strategies.equal_buffers import EqualBuffers, equal_in_forward
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.launched import LaunchedProcesses
from azureml_strategy.strategies.launcher import NodeLauncher
from azureml_strategy.strategies.loop_gradients import LoopGradients
from azureml_strategy.strategies.mixed_precision import (
    float32_buffers,
    make_contiguous,
    mix_precision,
    mix_sharded_precision,
)
from azureml_strategy.strategies.model_parallel.checkpoint import reading
from azureml_strategy.strategies.model_parallel.fsdp_internals import begin_as_root
from azureml_strategy.strategies.model_parallel.gradients import NormsOverMeshes, copy_gradients
from azureml_strategy.strategies.model_parallel.layout import Size, plan_layout
from azureml_strategy.strategies.model_parallel.plan import is_parallel, spread
from azureml_strategy.strategies.model_parallel.refusals import refuse_copies, refuse_optimizer
from azureml_strategy.strategies.model_parallel.units import Gathering
from azureml_strategy.strategies.model_parallel.whole_values import train_alike
from azureml_strategy.strategies.reduction import reduce_over_ranks
from azureml_strategy.strategies.true_precision import builds_tables, keep_precise
from azureml_strategy.strategies.zero.config import require_compiler, require_deepspeed, strategy_arguments
from azureml_strategy.strategies.zero.construction import Construction
from azureml_strategy.strategies.zero.device import AnyDevice
from azureml_strategy.strategies.zero.refusals import StartingParameters, refuse_lbfgs, refuse_scalars
from azureml_strategy.strategies.zero.watched_engine import FabricEngine


class FabricNodeLauncher(NodeLauncher):
    """`NodeLauncher` for a function with any arguments: Lightning's launcher for the Trainer consumes `trainer=`."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().launch(partial(function, *args, **kwargs))


class LaunchedFabricStrategy(LaunchedProcesses):
    """`LaunchedProcesses` for Fabric's strategies."""

    made_by = "Fabric"
    launcher_class = FabricNodeLauncher
    trains_several_types: ClassVar[bool] = False
    """As of `LaunchedStrategy`."""

    @property
    def precision(self) -> Precision:
        """Lightning's precision plugin, changed by `keep_precise`."""
        made: Precision = super().precision  # type: ignore[misc]
        return made

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        self._precision = precision
        if precision is not None:
            keep_precise(precision, lambda: True, self.trains_several_types)

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build a module in: `fabric.init_module()`. Its tables are computed in float32."""
        with builds_tables(self.precision), super().module_init_context(empty_init):  # type: ignore[misc]
            yield

    @override
    def _configure_launcher(self) -> None:
        self.num_nodes = self._num_nodes  # Fabric sets the attribute, not the property that follows the launch
        super()._configure_launcher()

    def all_reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduce a tensor over ranks, as `reduce_over_ranks` does.

        Fabric promises the result in the given tensor. A tensor of integers cannot hold their mean and gets it without
        its fraction: use the returned tensor.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        reduced = reduce_over_ranks(tensor, group, reduce_op)
        if reduced.is_floating_point() and not tensor.is_floating_point():
            tensor.copy_(reduced)
        return reduced


class FabricDDPStrategy(LaunchedFabricStrategy, DDPStrategy):
    """Fabric's DDP with nodes, processes and ranks from the Azure ML job: `Fabric(strategy="azureml_ddp")`.

    Gradients are views into the communication buckets, which saves a copy in each step.

    Args:
        gradient_as_bucket_view: see `torch.nn.parallel.DistributedDataParallel`.
        start_method: `popen`, which runs the script again for each further device. Notebooks need another method, and
            so one of Lightning's own strategies, such as `ddp_notebook`.
        cluster_environment: replaces the environment that the job's launch gives.
        require_infiniband: stop a multi-node job unless NCCL carries it over InfiniBand, instead of warning.
        kwargs: further arguments of `lightning.fabric.strategies.DDPStrategy` and `DistributedDataParallel`.

    Raises:
        LaunchError: the job's variables give no rank to trust or contradict the Fabric.
        ConfigurationError: another `start_method`.
    """

    trains_several_types = True

    def __init__(
        self,
        *,
        gradient_as_bucket_view: bool = True,
        start_method: str = "popen",
        cluster_environment: ClusterEnvironment | None = None,
        require_infiniband: bool = False,
        **kwargs: Any,
    ) -> None:
        if start_method != "popen":
            raise ConfigurationError(
                f"start_method={start_method!r}, but this strategy of Fabric starts processes by 'popen' alone. In a "
                "notebook write Fabric(strategy='ddp_notebook'); leave start_method out in a script."
            )
        super().__init__(
            gradient_as_bucket_view=gradient_as_bucket_view,
            cluster_environment=cluster_environment,
            require_infiniband=require_infiniband,
            **kwargs,
        )
        self._gradients = LoopGradients()

    @override
    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        # On the current stream, as the Trainer's AzureMLDDPStrategy does.
        ddp = CompletingDDP(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)
        self._gradients.add_module(ddp)
        return ddp

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._gradients.add_optimizer(optimizer, self.root_device)
        return optimizer

    # Fabric refuses loss.backward() under a strategy that overrides this method. `wraps` makes it look like the wrapped
    # one, so that loss.backward() stays allowed.
    @wraps(Strategy.backward)
    def backward(  # type: ignore[override]
        self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Average all gradients in the backward pass, or at its end."""
        with self._gradients.backward_pass(tensor):
            super().backward(tensor, module, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        closure = kwargs.get("closure")
        if closure is None:
            self._gradients.before_step(optimizer)
        else:
            kwargs["closure"] = self._gradients.closure_of(optimizer, closure)
        return super().optimizer_step(optimizer, **kwargs)


class FabricDeepSpeedStrategy(LaunchedFabricStrategy, AnyDevice, DeepSpeedStrategy):
    """Fabric's DeepSpeed (ZeRO) with processes from the Azure ML job: `Fabric(strategy="azureml_deepspeed")`.

    It runs on CPUs too. As in Fabric itself, DeepSpeed clips gradients if its configuration says so, and a checkpoint
    is for the number of processes that wrote it.

    Args:
        stage: what is partitioned over the processes. 1: optimizer states; 2, the default: gradients too; 3:
            parameters too.
        config: DeepSpeed's own configuration, a dictionary or the path of a JSON file, instead of the arguments here
            that have a place in it. Without a Trainer nothing replaces "auto" in it.
        offload_nvme: folder on a disk of the node that keeps parameters and optimizer states; `auto` finds the NVMe
            disk with the most free space. Needs stage 3.
        autocast: as of AzureMLDeepSpeedStrategy.
        broadcast_buffers: as of AzureMLDeepSpeedStrategy.
        cluster_environment: replaces the environment that the job's launch gives.
        require_infiniband: stop a multi-node job unless NCCL carries it over InfiniBand, instead of warning.
        kwargs: further arguments of `lightning.fabric.strategies.DeepSpeedStrategy`.

    Raises:
        NoDeepSpeedError: DeepSpeed is not installed.
        LaunchError: the job's variables give no rank to trust or contradict the Fabric.
        ConfigurationError: an unknown stage, or an argument beside a configuration that would be ignored.
        FileNotFoundError: `offload_nvme="auto"`, but there is no such disk.
    """

    requires_cuda = DeepSpeedStrategy

    def __init__(
        self,
        *,
        stage: int | None = None,
        config: str | Path | dict[str, Any] | None = None,
        offload_nvme: str | Path | None = None,
        autocast: bool | None = None,
        broadcast_buffers: bool = True,
        cluster_environment: ClusterEnvironment | None = None,
        require_infiniband: bool = False,
        **kwargs: Any,
    ) -> None:
        require_deepspeed()
        super().__init__(
            cluster_environment=cluster_environment,
            require_infiniband=require_infiniband,
            **strategy_arguments(stage, config, offload_nvme, kwargs),
        )
        assert isinstance(self.config, dict)
        if config is None:
            # With offload, DeepSpeed would refuse an optimizer of the script's, although torch runs it on the host too.
            self.config["zero_force_ds_cpu_optimizer"] = False
            self.config["gradient_clipping"] = 0.0  # Fabric leaves it out, and DeepSpeed's default clips the norm to 1
        self._autocast, self._broadcast_buffers = autocast, broadcast_buffers
        self._buffers: list[EqualBuffers] = []
        self._watched: dict[nn.Module, FabricEngine] = {}
        require_compiler(self.config)

    @contextmanager
    @override
    def module_sharded_context(self) -> Generator[None, None, None]:
        """Build a module in parts: `fabric.init_module()`. Under stage 3 its constructors may set weights."""
        if not self.zero_stage_3:
            yield
            return
        assert isinstance(self.config, dict)
        construction, loading = Construction(), Loading("zero_3", self.root_device, self.precision.precision)
        try:
            with zero_init(self.config, self.remote_device), construction.under(self.config), loading_as(loading):
                yield
        finally:
            construction.end()

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Any, list[Optimizer], Any]:
        make_contiguous(module)
        refuse_scalars(module)
        for each in optimizers:
            refuse_lbfgs(module, each)
        starting = StartingParameters(module, optimizers[0])
        engine, optimizers, scheduler = super().setup_module_and_optimizers(module, optimizers, scheduler)
        self._prepare(engine, module)
        self._watched[engine] = FabricEngine(engine, module, starting, self._watched)
        return engine, optimizers, scheduler

    @override
    def setup_module(self, module: nn.Module) -> Any:
        make_contiguous(module)
        engine = super().setup_module(module)
        self._prepare(engine, module)
        return engine

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        watched = self._watched.get(module) if module is not None else None
        if watched is not None:
            watched.before_backward()
        super().backward(tensor, module, *args, **kwargs)
        if watched is not None:
            watched.after_backward()

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        # Fabric gives DeepSpeed's optimizer, or the engine if that looks like one.
        watched = next(each for each in self._watched.values() if optimizer in (each.engine, each.engine.optimizer))
        closure = kwargs.pop("closure", None)  # DeepSpeed's step does not call it
        loss = None if closure is None else closure()
        watched.awaits_step = False  # DeepSpeed's step calls zero_grad before it takes the gradients
        watched.edited.take()
        steps = watched.engine.is_gradient_accumulation_boundary()
        if steps:
            drop_stale_gradients(watched.engine)
        output = super().optimizer_step(optimizer, **kwargs)
        if steps:
            forget_gradients(watched.engine)
        watched.edited.remember()
        return output if closure is None else loss

    def _prepare(self, engine: nn.Module, module: nn.Module) -> None:
        precision = self.precision.precision
        autocast = bool(float32_buffers(module)) if self._autocast is None else self._autocast
        mix_precision(module, precision, self.root_device.type, autocast)
        if self._broadcast_buffers:
            self._buffers.append(EqualBuffers(module, self.root_device))
            equal_in_forward(engine, module, self._buffers[-1])

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        for each in self._buffers:
            each.before_use()
        for watched in self._watched.values():
            watched.edited.take()
        super().save_checkpoint(*args, **kwargs)

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        loaded: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        for watched in self._watched.values():
            watched.edited.remember()
        return loaded


class FabricModelParallelStrategy(LaunchedFabricStrategy, ModelParallelStrategy):
    """FSDP2 and tensor parallelism with processes from the job: `Fabric(strategy="azureml_model_parallel")`.

    `fabric.setup` spreads a module as AzureMLModelParallelStrategy does: it cuts the layers of its
    `tensor_parallel_plan`, then shards each of its `sharded_blocks` and the rest over the data-parallel ranks.
    `fabric.setup(model, optimizer)` works too, which with Lightning's strategy trains nothing: sharding replaces the
    parameters, and the optimizer would step the old ones. Here it gets the new ones.

    Fabric does not hand a strategy the batches. With tensor parallelism, the ranks of a group get the same samples from
    `fabric.setup_dataloaders`, but random transformations must draw the same numbers on them.

    Args:
        parallelize_fn: spreads a module over the mesh instead, as with Lightning's strategy.
        data_parallel_size: replicas that read different samples; `auto` is what the other size leaves.
        tensor_parallel_size: ranks that compute a replica together. `auto` is what a given `data_parallel_size` leaves,
            otherwise 1, or all processes of a node with a `parallelize_fn`. The mesh is made before there is a module
            to ask.
        tensor_parallel_across_nodes: allow groups that span nodes; they wait for the network in every layer.
        activation_checkpointing: keep only the inputs of each sharded block, and recompute the rest in the backward
            pass.
        broadcast_buffers: as of AzureMLModelParallelStrategy.
        cluster_environment: replaces the environment that the job's launch gives.
        require_infiniband: stop a multi-node job unless NCCL carries it over InfiniBand, instead of warning.
        kwargs: further arguments of Lightning's strategy, such as `save_distributed_checkpoint` and `timeout`.

    Raises:
        LaunchError: the job's variables give no rank to trust or contradict the Fabric.
        ConfigurationError: at the launch or in `fabric.setup`, if the sizes or the plan do not fit.
    """

    def __init__(
        self,
        *,
        parallelize_fn: Callable[[Any, DeviceMesh], Any] | None = None,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        tensor_parallel_across_nodes: bool = False,
        activation_checkpointing: bool = False,
        broadcast_buffers: bool = True,
        cluster_environment: ClusterEnvironment | None = None,
        require_infiniband: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            parallelize_fn=parallelize_fn or self._spread,
            cluster_environment=cluster_environment,
            require_infiniband=require_infiniband,
            **kwargs,
        )
        self._asked_sizes = (data_parallel_size, tensor_parallel_size)
        self._across_nodes = tensor_parallel_across_nodes
        self._cuts_by_itself = parallelize_fn is not None
        self._activation_checkpointing = activation_checkpointing
        self._broadcast_buffers = broadcast_buffers
        self._buffers: list[EqualBuffers] = []
        self._uncut: list[nn.Parameter] = []
        self._gatherings: dict[nn.Module, Gathering] = {}

    @override
    def setup_environment(self) -> None:
        layout = plan_layout(
            *self._asked_sizes,
            num_nodes=self.num_nodes,
            processes_per_node=self.num_processes,
            cuts_tensors=self._cuts_by_itself,
            across_nodes=self._across_nodes,
        )
        self._data_parallel_size = layout.data_parallel_size
        self._tensor_parallel_size = layout.tensor_parallel_size
        super().setup_environment()

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        for each in optimizers:
            refuse_optimizer(each)
        names = {parameter: name for name, parameter in module.named_parameters()}
        module = self.setup_module(module)
        for each in optimizers:
            if each.state:
                raise ConfigurationError(
                    f"{type(each).__name__} has state of parameters that fabric.setup replaces by shards. Make it "
                    "after `model = fabric.setup_module(model)`, and give it to fabric.setup_optimizers."
                )
        for group in [group for each in optimizers for group in each.param_groups]:
            group["params"] = [module.get_parameter(names[old]) if old in names else old for old in group["params"]]
        return module, [self.setup_optimizer(each) for each in optimizers], scheduler

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        mix_sharded_precision(module, self.precision.precision, self.root_device.type)
        module = super().setup_module(module)
        if module in self._gatherings:  # set up again
            self._gatherings.pop(module).remove()
        gathering = self._gatherings[module] = Gathering(module)

        def shard_after_evaluation(*_: object) -> None:
            # No backward pass follows that would do so, and a step would not change the gathered parameters.
            if not torch.is_grad_enabled():
                gathering.after_step()

        module.register_forward_hook(shard_after_evaluation)
        refuse_copies(module)
        if isinstance(module, FSDPModule):
            begin_as_root(module)
        if self._broadcast_buffers:
            group = self.device_mesh["data_parallel"].get_group() if self._cuts_by_itself else None
            self._buffers.append(EqualBuffers(module, self.root_device, group))
            equal_in_forward(module, module, self._buffers[-1])
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        refuse_optimizer(optimizer)
        if not self._cuts_by_itself:  # parallelize_fn may give each rank others, such as experts
            train_alike(optimizer)
        return optimizer

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        for each in self._buffers:
            each.before_use()
        super().save_checkpoint(*args, **kwargs)

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with reading(kwargs.get("weights_only")):
            return super().load_checkpoint(*args, **kwargs)

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        for each in self._gatherings.values():
            each.before_backward()
        super().backward(tensor, module, *args, **kwargs)
        for each in self._gatherings.values():
            each.after_backward()
        if self._uncut:
            copy_gradients(self._uncut, self.device_mesh["tensor_parallel"].get_group())

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, **kwargs)
        for each in self._gatherings.values():
            each.after_step()
        return output

    @override
    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        with NormsOverMeshes():
            return super().clip_gradients_norm(*args, **kwargs)

    def _spread(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if not is_parallel(module):
            self._uncut += spread(
                module,
                mesh,
                self.root_device,
                precision=self.precision.precision,
                activation_checkpointing=self._activation_checkpointing,
            )
        return module
