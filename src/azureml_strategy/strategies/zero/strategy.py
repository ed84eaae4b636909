"""Lightning's DeepSpeed strategy (ZeRO, AutoTP) with processes from the job."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from warnings import catch_warnings, filterwarnings

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from azureml_strategy.huggingface.loading import Way
from azureml_strategy.interfaces import ALL_RANKS
from azureml_strategy.lightning_internals import training_source
from azureml_strategy.strategies.compilation.compilation import Compile
from azureml_strategy.strategies.compilation.parts import blocks_of
from azureml_strategy.strategies.deepspeed_internals import zero_init
from azureml_strategy.strategies.errors import ConfigurationError, MissingPlanError
from azureml_strategy.strategies.launched import LaunchedStrategy
from azureml_strategy.strategies.mixed_precision import float32_buffers, make_contiguous
from azureml_strategy.strategies.second_derivatives import refuse_second_derivatives
from azureml_strategy.strategies.zero.checkpoint import AnyWorldDeepSpeedStrategy
from azureml_strategy.strategies.zero.config import (
    TrainerNumbers,
    add_up_precisely,
    agree,
    require_compiler,
    require_deepspeed,
    strategy_arguments,
)
from azureml_strategy.strategies.zero.construction import Construction, place_all_but_parameters
from azureml_strategy.strategies.zero.gathering import gather_as_one
from azureml_strategy.strategies.zero.gradients import with_buffered_gradients
from azureml_strategy.strategies.zero.hooks import WatchedHooks, whole_parameters_alone
from azureml_strategy.strategies.zero.refusals import (
    StartingParameters,
    refuse_callbacks,
    refuse_scalars,
    warn_of_unfilled_steps,
)
from azureml_strategy.strategies.zero.watched_engine import WatchedEngine

# DeepSpeed's names for the styles of a plan.
_PARTITIONS: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": "column"},
    "colwise_gather_output": {"partition_type": "column", "gather_output": True},
    "rowwise": {"partition_type": "row"},
}


def agreed_size(config: Mapping[str, Any], asked: int) -> int:
    """Return how many ranks share each matrix, from DeepSpeed's configuration or the argument.

    Args:
        config: it may have a `tensor_parallel` section.
        asked: the argument; 1 if it was left out.

    Raises:
        ConfigurationError: the two contradict each other.
    """
    size = config.get("tensor_parallel", {}).get("autotp_size") or asked
    if asked not in (1, size):
        raise ConfigurationError(
            f"tensor_parallel_size={asked}, but the DeepSpeed configuration says autotp_size={size}. "
            "Leave one of them out."
        )
    return int(size)


def section(module: nn.Module) -> dict[str, Any]:
    """Return the `tensor_parallel` section with which DeepSpeed cuts matrices by the module's `tensor_parallel_plan`.

    Raises:
        ConfigurationError: the module has no such method (MissingPlanError), or DeepSpeed lacks one of the styles.
    """
    plan = getattr(module, "tensor_parallel_plan", None)
    if plan is None:
        raise MissingPlanError(
            f"Tensor parallelism was asked for, but {type(module).__name__} has no tensor_parallel_plan(), so nothing "
            "says which matrices to cut. Add it: return {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, "
            "or give a DeepSpeed configuration with a `tensor_parallel` section of its own."
        )
    specs = []
    for pattern, style in plan().items():
        if style not in _PARTITIONS:
            raise ConfigurationError(
                f"The tensor-parallel plan says {pattern!r}: {style!r}, but DeepSpeed has only "
                f"{', '.join(_PARTITIONS)}."
            )
        # DeepSpeed takes a regex for names of parameters. The `*` of a plan stands for one part between dots.
        layers = re.escape(pattern).replace(r"\*", r"[^.]+")
        specs.append({"patterns": [rf"(.*\.)?{layers}\.(weight|bias)$"], **_PARTITIONS[style]})
    return {"partition_config": {"use_default_specs": False, "layer_specs": specs}}


def check_divides(world_size: int, size: int) -> None:
    """Check that the job's processes can be divided into tensor-parallel groups."""
    if world_size % size:
        raise ConfigurationError(
            f"tensor_parallel_size={size} does not divide the {world_size} processes of the job. Choose a divisor of "
            f"{world_size}, at best of the number of GPUs in a node."
        )


class AzureMLDeepSpeedStrategy(LaunchedStrategy, AnyWorldDeepSpeedStrategy):
    """Lightning's DeepSpeed with nodes, processes and ranks from the Azure ML job: `strategy="azureml_deepspeed"`.

    Besides the launch, it differs from the stock strategy as follows. It runs on CPUs too. It accepts a configuration
    that says "auto" or repeats the Trainer's numbers, and refuses one that contradicts them. Weights that
    configure_model sets after their layers were cut are the author's. Another number of processes can resume a
    checkpoint. Matrices can be cut over processes (AutoTP).

    Args:
        stage: what is partitioned over the processes. 1: optimizer states; 2, the default: gradients too; 3:
            parameters too (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).
        config: DeepSpeed's own configuration, a dictionary or the path of a JSON file. It replaces all arguments here
            that have a place in it.
        offload_nvme: folder on a disk of the node that keeps parameters and optimizer states; `auto` finds the NVMe
            disk with the most free space. Needs stage 3.
        tensor_parallel_size: ranks that share each matrix and read the same samples; the module's
            `tensor_parallel_plan()` says how.
        autocast: run the forward pass under torch.autocast in `bf16-mixed` and `16-mixed`, and give it batches as they
            are; None does so for modules with float32 buffers that meet activations. Without it, floating-point inputs
            and targets are rounded to 16 bits.
        broadcast_buffers: give all ranks the first one's buffers, as DDP does; see
            `azureml_strategy.strategies.equal_buffers`.
        logging_batch_size_per_gpu: samples per batch of one process in DeepSpeed's speed log, for loaders that do not
            tell; `auto` takes the loader's number. Nothing else depends on it. It works beside `config` too.
        cluster_environment: replaces the environment that the job's launch gives.
        require_infiniband: stop a multi-node job unless NCCL carries it over InfiniBand, instead of warning.
        compile: compile each kind of repeated block once (`blocks`), or each network in one piece (`whole`), or
            nothing (`off`); see `azureml_strategy.strategies.compilation`. Stage 3 gathers a compiled block as one, and
            has no `whole`.
        compile_mode: of torch.compile; None for its default.
        kwargs: further arguments of `lightning.pytorch.strategies.DeepSpeedStrategy`, such as `offload_optimizer`,
            `offload_parameters`, `load_full_weights`, `timeout`.

    Raises:
        NoDeepSpeedError: DeepSpeed is not installed.
        LaunchError: the job's variables give no rank to trust or contradict the Trainer.
        ConfigurationError: an unknown stage, or an argument beside a configuration that would be ignored.
        FileNotFoundError: `offload_nvme="auto"`, but there is no such disk.
    """

    def __init__(
        self,
        *,
        stage: int | None = None,
        config: str | Path | dict[str, Any] | None = None,
        offload_nvme: str | Path | None = None,
        tensor_parallel_size: int = 1,
        autocast: bool | None = None,
        broadcast_buffers: bool = True,
        logging_batch_size_per_gpu: int | Literal["auto"] = "auto",
        cluster_environment: ClusterEnvironment | None = None,
        require_infiniband: bool = False,
        compile: Compile | bool | None = "off",  # noqa: A002 - torch's word for it
        compile_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        require_deepspeed()
        kwargs = strategy_arguments(stage, config, offload_nvme, kwargs)
        # LightningCLI reads here that `kwargs` are Lightning's arguments.
        super().__init__(
            cluster_environment=cluster_environment,
            require_infiniband=require_infiniband,
            compile=compile,
            compile_mode=compile_mode,
            **kwargs,
        )
        assert isinstance(self.config, dict)
        if config is None:
            # With offload, DeepSpeed would refuse the module's own optimizer, although torch runs it on the host too.
            self.config["zero_force_ds_cpu_optimizer"] = False
        self._logged_batch_size = None if logging_batch_size_per_gpu == "auto" else logging_batch_size_per_gpu
        self._autocast, self._broadcast_buffers = autocast, broadcast_buffers
        self._tensor_parallel_size = agreed_size(self.config, tensor_parallel_size)
        require_compiler(self.config)
        if self.zero_stage_3 and self._compilation.how == "whole":
            raise ConfigurationError(
                "compile='whole' has one graph for a network, and ZeRO-3 gathers parameters between its parts. Write "
                "compile='blocks', which gathers each block as one; or stage=2."
            )
        self._construction = Construction()
        self._undo_gathering: Callable[[], None] | None = None
        self._hooks: WatchedHooks | None = None
        # The loss scales before and after `scale_gradients`, until the step.
        self._loss_scales: tuple[float, float] | None = None

    @override
    def adapt_precision(self, plugin: Precision) -> Precision:
        return with_buffered_gradients(plugin)

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_callbacks(trainer.callbacks, self.zero_stage_3)  # type: ignore[attr-defined]
        super().setup_environment()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        if self.lightning_module is not None:
            # This asks the user for a loader. Its tensors must not be made on the GPU, as those of a model are inside.
            self._init_config_if_needed()
        with super().tensor_init_context(empty_init):
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        self._init_config_if_needed()
        if not self.zero_stage_3:
            yield
            return
        assert isinstance(self.config, dict)
        with zero_init(self.config, self.remote_device), self._construction.under(self.config):
            yield

    @override
    def _setup_model(self, model: Module) -> Module:  # type: ignore[override]
        make_contiguous(model)
        if self.zero_stage_3:
            place_all_but_parameters(model, self.root_device)
        return super()._setup_model(model)

    @override
    def init_deepspeed(self) -> None:
        with catch_warnings():
            if self.clips_by_hook:
                # It says that the hook cannot clip. Here it can.
                filterwarnings("ignore", "Since DeepSpeed handles gradient clipping internally")
            super().init_deepspeed()
        assert self.lightning_module is not None
        module = self.lightning_module
        self.mix_precision(module, bool(float32_buffers(module)) if self._autocast is None else self._autocast)
        if self._broadcast_buffers:
            self.keep_buffers_equal(module)

    @override
    def teardown(self) -> None:
        self._construction.end()
        if self._hooks is not None:
            self._hooks.end()
            self._hooks = None
        if self._undo_gathering is not None:
            self._undo_gathering()
            self._undo_gathering = None
        super().teardown()

    @property
    @override
    def loads_pretrained(self) -> Way:
        # One process cuts its parameters too, into one part.
        return "zero_3" if self.zero_stage_3 else super().loads_pretrained

    @property
    def exclude_frozen_parameters(self) -> bool:
        """Whether DeepSpeed writes no frozen parameter. It writes them beside the module's state dict, all or none."""
        return self._exclude_frozen_parameters or self.only_base_is_frozen()

    @exclude_frozen_parameters.setter
    def exclude_frozen_parameters(self, exclude: bool) -> None:
        self._exclude_frozen_parameters = exclude

    @property
    @override
    def alike(self) -> int:
        return self.world_size // self.distributed_sampler_kwargs["num_replicas"]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        size = self._tensor_parallel_size
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}

    @property
    @override
    def copies(self) -> str:
        size = self._tensor_parallel_size
        return ALL_RANKS if size == 1 else f"tensor-parallel rank {self.global_rank % size}"

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        assert self.lightning_module is not None
        assert isinstance(self.config, dict)
        check_divides(self.world_size, self._tensor_parallel_size)
        trainer = self.lightning_module.trainer
        self.config = agree(
            self.config,
            TrainerNumbers(
                accumulate_grad_batches=trainer.accumulate_grad_batches,
                gradient_clip_val=trainer.gradient_clip_val,
                precision=self.precision_plugin.precision,
                batch_size=self._batch_size(),
                data_parallel_size=self.distributed_sampler_kwargs["num_replicas"],
                logged_batch_size=self._logged_batch_size,
            ),
        )
        if self.precision_plugin.precision.startswith("bf16"):
            add_up_precisely(self.config, trainer.accumulate_grad_batches)
        if self._tensor_parallel_size > 1:
            cuts = self.config.get("tensor_parallel") or section(self.lightning_module)
            self.config["tensor_parallel"] = {**cuts, "autotp_size": self._tensor_parallel_size}
        if self.clips_by_hook and trainer.gradient_clip_val is not None:
            self.config["gradient_clipping"] = 0.0
        super()._format_batch_size_and_grad_accum_config()

    def _batch_size(self) -> int | None:
        """Return the training loader's batch size. Lightning's own way fails for a loader without a batch sampler."""
        assert self.lightning_module is not None
        source = training_source(self.lightning_module.trainer)
        sampler = getattr(source.dataloader(), "batch_sampler", None) if source.is_defined() else None
        return getattr(sampler, "batch_size", None)

    @override
    def _setup_model_and_optimizer(
        self, model: Module, optimizer: Optimizer | None, lr_scheduler: LRScheduler | ReduceLROnPlateau | None = None
    ) -> tuple[Any, Optimizer]:
        refuse_scalars(model)
        starting = StartingParameters(model, optimizer)
        engine, optimizer = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        assert self.lightning_module is not None
        self._watched = WatchedEngine(engine, self.lightning_module, starting)
        self._edited = self._watched.edited
        if self.zero_stage_3:
            self._hooks = WatchedHooks(self.lightning_module.trainer, self.lightning_module)
            self._undo_gathering = gather_as_one(engine, self._compilation.parts(self.trained_networks()))
        if self._tensor_parallel_size > 1:
            from deepspeed.module_inject.layers import TensorParallel_Layer

            # DeepSpeed checks that ranks read the same samples, but cannot compare a batch inside the arguments of a
            # step. Here the sampler makes sure of it.
            engine.first_dataloader_check.remove()
            for layer in engine.module.modules():
                if isinstance(layer, TensorParallel_Layer):
                    refuse_second_derivatives(layer)
        return engine, optimizer

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        warn_of_unfilled_steps(self.lightning_module.trainer)

    @override
    def trained_networks(self) -> Iterable[nn.Module]:
        networks = super().trained_networks()
        if not (self.zero_stage_3 and self._compilation.is_on):
            return networks
        # What is compiled is gathered as one, and a network without blocks would be whole at once.
        found = [each for each in networks if blocks_of(each)]
        if not found:
            rank_zero_warn(
                f"compile='blocks' compiles nothing: {type(self.lightning_module).__name__} repeats no part, and "
                "ZeRO-3 would have to gather all of it for one graph. Give it a method sharded_blocks() that returns "
                "its layers, or use stage=2."
            )
        return found

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        # A step by manual optimization contains DeepSpeed's and our own code that goes through the parameters.
        refuses = self.zero_stage_3 and module.automatic_optimization
        with whole_parameters_alone(module) if refuses else nullcontext():
            return super().training_step(*args, **kwargs)

    @override
    def ends_step(self) -> bool:
        # DeepSpeed counts on over the end of an epoch.
        return bool(self.deepspeed_engine.is_gradient_accumulation_boundary())

    @override
    def scale_gradients(self, factor: Tensor) -> None:
        # DeepSpeed keeps the gradients to itself, and divides them by the loss scale before it clips them. It waits for
        # the GPU in each step anyway.
        optimizer = self.deepspeed_engine.optimizer
        if not hasattr(optimizer, "loss_scale"):  # the optimizer of bf16 with gradients in float32 shows these instead
            for gradients in optimizer.fp32_groups_gradients_flat:
                gradients.mul_(factor)
            return
        given = float(optimizer.loss_scale)
        optimizer.loss_scale = given / float(factor)
        self._loss_scales = given, float(optimizer.loss_scale)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if self._loss_scales is not None:
            (given, scaled), self._loss_scales = self._loss_scales, None
            # In float16 the step may have halved it after an overflow, or doubled it after many steps without one.
            optimizer = self.deepspeed_engine.optimizer
            optimizer.loss_scale = given * (float(optimizer.loss_scale) / scaled)
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # Lightning has divided the loss by the batches of a step, and DeepSpeed would divide it again. The gradients
        # would be too small, which matters for optimizers other than Adam and for clipping.
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)
