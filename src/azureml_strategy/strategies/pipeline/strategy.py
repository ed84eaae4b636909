"""Pipeline parallelism under Lightning's Trainer.

One batch of Lightning's loop is one global batch of the replica. The strategy cuts it into micro-batches. Its
`training_step` runs all of them, forward and backward, through the stages in DeepSpeed's 1F1B schedule. Then the loop
continues as usual: `on_after_backward`, `on_before_optimizer_step`, the optimizer step, learning rate schedules,
metrics, callbacks. All ranks run the loop in step.

The LightningModule's own step runs on the last stage, once per micro-batch; its call of `forward` returns the outputs
of the pipeline. So the user's code for loss, metrics and logging stays unchanged. The strategy reduces the logged
values over the micro-batches and logs them once on every stage, so that all ranks' callbacks and rank 0's loggers see
them.

`setup` cuts the module: `configure_model` runs on the meta device, each stage makes its own layers, and placeholders
replace the others. A module that holds a transformers model and has no `pipeline_layers` is built whole, then cut. So
`configure_optimizers` sees only the parameters of the stage.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.control.gather import Exchange, gather
from azureml_strategy.huggingface.loading import Loading, fill_all, loading_as, refuse_lost_values
from azureml_strategy.interfaces import WriteStaged
from azureml_strategy.lightning_internals import skip_backward, updates_logs
from azureml_strategy.strategies.compilation import Compile
from azureml_strategy.strategies.launched import LaunchedStrategy
from azureml_strategy.strategies.mixed_precision import MIXED, float32_buffers
from azureml_strategy.strategies.pipeline.checkpoint import PipelineLayout
from azureml_strategy.strategies.pipeline.cutting import Cut, find_chain
from azureml_strategy.strategies.pipeline.engine import PipelineRun, StageClock, StageEngine
from azureml_strategy.strategies.pipeline.micro_batches import check_loader
from azureml_strategy.strategies.pipeline.partition import PipelineError, PipelineReady, check_method
from azureml_strategy.strategies.pipeline.refusals import (
    refuse_changes,
    refuse_optimizers_of_stages,
    refuse_stages_of_copies,
    refuse_unsupported,
)
from azureml_strategy.strategies.pipeline.stage import StageModule
from azureml_strategy.strategies.true_precision import builds_tables
from azureml_strategy.strategies.zero.checkpoint import StagedDeepSpeedStrategy
from azureml_strategy.strategies.zero.config import ignored_beside_config, require_deepspeed
from azureml_strategy.strategies.zero.gradients import with_buffered_gradients
from azureml_strategy.strategies.zero.refusals import StartingParameters
from azureml_strategy.strategies.zero.watched_engine import EditedWeights


class PipelineStrategy(LaunchedStrategy, StagedDeepSpeedStrategy):
    """DeepSpeed's pipeline engine driven by the Trainer: `Trainer(strategy="azureml_deepspeed_pipeline")`.

    The module says how it is cut, see `PipelineReady`, or holds a transformers model. With n times as many ranks as
    stages there are n replicas, which read different samples. Each batch of a data loader belongs to one replica.

    Args:
        num_stages: parts that the module is cut into; must divide the number of ranks. `auto`: 2, and 1 where there is
            a single process.
        micro_batches: pieces that a training batch is cut into; must divide the batch size. With more of them, the
            stages are less idle, see `pipeline_bubble`.
        partition: quantity of which each stage gets an equal share: `parameters`, `uniform` (layers) or `type:KIND`
            (layers of that kind).
        activation_checkpointing: keep the activations only at every n-th layer of a stage, and recompute the others in
            the backward pass; 0 keeps all.
        zero_stage: 1 partitions the optimizer states over the replicas; 0 does not. With bfloat16, where the states
            hold float32 copies of the parameters, it is always 1.
        autocast: run layers and steps under torch.autocast in `bf16-mixed`, and give them batches as they are; None
            does so for modules with float32 buffers that meet activations.
        broadcast_buffers: give all replicas the first one's buffers, as DDP does; see
            `azureml_strategy.strategies.equal_buffers`.
        cluster_environment: replaces the environment that the job's launch gives.
        require_infiniband: stop a multi-node job unless NCCL carries it over InfiniBand, instead of warning.
        compile: compile each kind of the stage's layers once (`blocks`), or each layer by itself (`whole`), or nothing
            (`off`); see `azureml_strategy.strategies.compilation`.
        compile_mode: of torch.compile; None for its default.
        kwargs: `accelerator`, `parallel_devices`, `precision_plugin`, `process_group_backend`, `timeout` and
            `logging_level` of `lightning.pytorch.strategies.DeepSpeedStrategy`.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
        LaunchError: the job's variables give no rank to trust or contradict the Trainer.
        PipelineError: an argument is out of range; or, later, something does not fit the pipeline, see the message.
    """

    leaves_base_out = False  # each layer's own state dict is written
    _autocasts = False
    _cut: Cut | None = None
    _checked_epoch: int | None = None
    _run: PipelineRun | None = None
    _starting: StartingParameters | None = None

    def __init__(
        self,
        *,
        num_stages: int | Literal["auto"] = "auto",
        micro_batches: int = 4,
        partition: str = "parameters",
        activation_checkpointing: int = 0,
        zero_stage: int = 0,
        autocast: bool | None = None,
        broadcast_buffers: bool = True,
        cluster_environment: ClusterEnvironment | None = None,
        require_infiniband: bool = False,
        compile: Compile | bool | None = "off",  # noqa: A002 - torch's word for it
        compile_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        require_deepspeed()
        check_method(partition)
        stages = 2 if num_stages == "auto" else num_stages
        _check_range("num_stages", stages, stages >= 1, "1 or more")
        _check_range("micro_batches", micro_batches, micro_batches >= 1, "1 or more")
        _check_range("activation_checkpointing", activation_checkpointing, activation_checkpointing >= 0, "0 or more")
        _check_range("zero_stage", zero_stage, zero_stage in (0, 1), "0 or 1: more would cut gradients in mid-schedule")
        ignored = ignored_beside_config(kwargs)
        if ignored:
            raise PipelineError(f"A pipeline has no {', '.join(ignored)}: those are arguments of ZeRO. Leave them out.")
        self.num_stages, self._chooses_stages = stages, num_stages == "auto"
        self.micro_batches = micro_batches
        self.partition = partition
        self.activation_checkpointing = activation_checkpointing
        self.zero_stage = zero_stage
        self._autocast, self._broadcast_buffers = autocast, broadcast_buffers
        super().__init__(
            cluster_environment=cluster_environment,
            require_infiniband=require_infiniband,
            config={
                "zero_allow_untested_optimizer": True,  # otherwise DeepSpeed accepts only its own
                "zero_optimization": {"stage": zero_stage},
                "steps_per_print": None,  # Lightning's loggers and progress bar report instead
            },
            compile=compile,
            compile_mode=compile_mode,
            **kwargs,
        )

    @override
    def adapt_precision(self, plugin: Precision) -> Precision:
        return with_buffered_gradients(plugin)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        # Consecutive ranks are replicas of the same stage, see StageModule.
        replicas = self.world_size // self.num_stages
        return {"num_replicas": replicas, "rank": self.global_rank % replicas}

    @property
    def pipeline_stage(self) -> int:
        """The stage of this rank, once the model is set up."""
        return int(self.deepspeed_engine.stage_id)

    @property
    def stage_sizes(self) -> list[tuple[int, int, int]]:
        """First layer, last layer and number of trainable parameters of each stage, once the module is set up."""
        assert self._cut is not None
        return self._cut.sizes()

    @property
    def stage_groups(self) -> tuple[ProcessGroup, ProcessGroup]:
        """The replicas of this rank's stage, and one rank of each stage, once the model is set up."""
        grid = self.deepspeed_engine.grid
        return grid.get_data_parallel_group(), grid.get_pipe_parallel_group()

    @property
    @override
    def copies(self) -> str:
        return f"stage {self.pipeline_stage}"

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        refuse_unsupported(
            trainer, self.lightning_module, self.precision_plugin.precision, self._layer_sync is not None
        )
        super().setup_environment()
        if self._chooses_stages and self.world_size == 1:
            self.num_stages = 1
        if self.world_size % self.num_stages:
            raise PipelineError(
                f"num_stages={self.num_stages} does not divide the {self.world_size} processes of this run. Choose a "
                f"divisor of {self.world_size}, or another number of processes."
            )

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        if isinstance(self.lightning_module, PipelineReady):
            # configure_model makes only a sketch without memory: each stage makes its own layers later.
            with torch.device("meta"), builds_tables(self.precision_plugin):
                yield
        else:
            # A model of transformers is made whole, in the memory of the host, unless its weights are in files.
            loading = Loading("in_parts", self.root_device, self.precision_plugin.precision)
            with loading_as(loading), builds_tables(self.precision_plugin):
                yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        yield

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            check_loader(trainer, self.micro_batches)
            skip_backward(trainer)  # training_step runs the backward pass
        super().setup(trainer)

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        assert self.lightning_module is not None
        assert isinstance(self.config, dict)
        self.config["train_micro_batch_size_per_gpu"] = 1  # for DeepSpeed's own counters only
        self.config["gradient_accumulation_steps"] = self.micro_batches
        self.config["gradient_clipping"] = self.lightning_module.trainer.gradient_clip_val or 0.0
        if self.precision_plugin.precision.startswith("bf16"):
            # Sums over micro-batches would lose digits in bfloat16. DeepSpeed keeps them in float32 only under ZeRO.
            self.config["data_types"] = {"grad_accum_dtype": "fp32"}
            self.config["zero_optimization"] = {"stage": 1}

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        assert isinstance(model, LightningModule)
        refuse_lost_values(model)
        self._chain = find_chain(model, self.activation_checkpointing > 0)
        self._cut = Cut(model, self._chain, self.num_stages, self.partition)
        replicas = self.world_size // self.num_stages
        refuse_stages_of_copies(self._cut.stages_of_copies(), self.precision_plugin.precision)
        found = bool(float32_buffers(model)) or self._cut.has_float32_buffers()
        self._autocasts = found if self._autocast is None else self._autocast
        self._cut.drop_others(self.global_rank // replicas)
        fill_all(model, self.root_device)
        # as configure_model would make these layers
        with self.precision_plugin.tensor_init_context(), builds_tables(self.precision_plugin):
            self._stage = StageModule(self._cut.stage_layers(), self._cut.bounds, self.activation_checkpointing)
        self.precision_plugin.convert_module(self._stage)  # Lightning has converted sketches; these layers are new
        self._cut.keep_built()
        self._stage.set_modes_but_of(model)
        rank_zero_info(self._cut.summary(replicas))
        return model.to(self.root_device)

    @override
    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        assert isinstance(model, LightningModule)
        assert isinstance(self.config, dict)
        config = self.config if optimizer is not None else {**self.config, "zero_optimization": {"stage": 0}}
        self._starting = None if optimizer is None else StartingParameters(model, optimizer)
        clock = StageClock(self.root_device)
        engine = StageEngine(self._stage, optimizer, lr_scheduler, config, clock)
        engine.set_mode = model.train
        if optimizer is not None:
            self._edited = EditedWeights(engine)
        self._run = PipelineRun(engine, model, self._chain, self.micro_batches)
        self.mix_precision(self._stage, self._autocasts)
        dtype = MIXED.get(self.precision_plugin.precision)
        if self._autocasts and dtype is not None:
            # The module's step runs beside the layers, on what comes out of them.
            self._stage.loss_fn = torch.autocast(self.root_device.type, dtype)(self._stage.loss_fn)
        if self._broadcast_buffers:
            self.keep_buffers_equal(self._stage, engine.grid.get_data_parallel_group())
        return engine, engine.optimizer

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        made, fault = None, None
        try:
            made = super()._init_optimizers()
        except ValueError as error:  # torch's optimizers raise it without parameters, as a stage may have it
            fault = error
        refuse_optimizers_of_stages([str(each) for each in gather(fault and str(fault)) if each])
        assert made is not None
        return made

    @override
    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        self.model, _ = self._setup_model_and_optimizer(model, None)

    @override
    def training_step(self, batch: Any, *arguments: Any) -> Tensor:
        assert self._run is not None
        assert self.lightning_module is not None
        self._check_changes()
        self.equal_before_step()
        measure = updates_logs(self.lightning_module.trainer)
        with self.two_types_explained():
            loss = self._run.train(batch, arguments, measure)
        return self.precision_plugin.post_backward(loss, self.lightning_module)  # calls on_after_backward

    @override
    def trained_networks(self) -> Iterable[nn.Module]:
        assert self._cut is not None
        return [nn.ModuleList(self._cut.built())]

    @override
    def validation_step(self, batch: Any, *arguments: Any) -> None:
        assert self._run is not None
        self._compilation.before_batch(training=False)
        with self.two_types_explained():
            self._run.evaluate("validation_step", batch, arguments)

    @override
    def test_step(self, batch: Any, *arguments: Any) -> None:
        assert self._run is not None
        self._run.evaluate("test_step", batch, arguments)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            self._layout().write(Path(filepath))

    @override
    def stage_checkpoint(self, checkpoint: dict[str, Any]) -> tuple[Any, WriteStaged] | None:
        staged = super().stage_checkpoint(checkpoint)
        if staged is None:
            return None
        files, write_files = staged
        layout = self._layout()

        def write(content: Any, path: Path, exchange: Exchange) -> None:
            write_files(content, path, exchange)
            exchange.on_rank_zero(lambda: layout.write(path))

        return files, write

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        training = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        self._layout().check(Path(checkpoint_path), training)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def teardown(self) -> None:
        if self.lightning_module is not None and any(each.is_meta for each in self.lightning_module.parameters()):
            # An error stopped the run before the module was cut. Lightning's teardown would copy the meta tensors.
            self._lightning_module = None
        super().teardown()

    def _check_changes(self) -> None:
        """Refuse what the stages can no longer train: on all ranks in the first step of an epoch, alone in others."""
        assert self._cut is not None
        assert self.lightning_module is not None
        assert self._starting is not None
        epoch = self.lightning_module.trainer.current_epoch
        plain = isinstance(self.deepspeed_engine.optimizer, Optimizer)  # trains what requires a gradient, like torch
        change = None if plain else self._starting.changes()
        if epoch != self._checked_epoch:
            self._checked_epoch = epoch
            self._cut.check_nothing_added()
            refuse_changes([words for words in gather(change) if words])
        elif change:  # the other stages wait for this one, which ends the job
            refuse_changes([change])

    def _layout(self) -> PipelineLayout:
        assert self._cut is not None
        replicas, precision = self.world_size // self.num_stages, self.precision_plugin.precision
        return PipelineLayout(self._cut.bounds, replicas, self.zero_stage, precision, self._cut.places)


def _check_range(name: str, value: int, valid: bool, allowed: str) -> None:
    if not valid:
        raise PipelineError(f"{name}={value} is out of range: it must be {allowed}.")
