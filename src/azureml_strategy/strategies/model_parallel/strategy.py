"""FSDP2 and tensor parallelism on one device mesh, with processes from the job."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.checkpoint.serialization import WRITTEN_APART, run_objects, to_plain
from azureml_strategy.huggingface.loading import Way
from azureml_strategy.interfaces import ALL_RANKS, HasShardedBlocks, WriteStaged
from azureml_strategy.lightning_internals import accumulates, give_device_mesh
from azureml_strategy.sequence_parallel import SequenceGroup
from azureml_strategy.strategies.averages import keep_averages
from azureml_strategy.strategies.compilation import Compile
from azureml_strategy.strategies.equal_buffers import EqualBuffersStrategy
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.launched import LaunchedStrategy
from azureml_strategy.strategies.mixed_precision import mix_sharded_precision
from azureml_strategy.strategies.model_parallel.checkpoint import (
    check_checkpoint,
    copy_batch,
    in_plain_types,
    reading,
    warn_of_unloadable,
    write_distributed,
)
from azureml_strategy.strategies.model_parallel.gradients import copy_gradients, warn_of_lost_hooks
from azureml_strategy.strategies.model_parallel.layout import MeshLayout, Size, check_counts, for_meshes, plan_layout
from azureml_strategy.strategies.model_parallel.module import (
    HasTensorParallelPlan,
    counts_of,
    plan_of,
    share_sequences,
)
from azureml_strategy.strategies.model_parallel.plan import is_parallel, reshard, spread
from azureml_strategy.strategies.model_parallel.refusals import (
    RECOMPUTED_MESH,
    ParameterMemory,
    explain,
    refuse_callbacks,
    refuse_optimizer,
)
from azureml_strategy.strategies.model_parallel.units import Gathering
from azureml_strategy.strategies.model_parallel.whole_values import (
    copies_in,
    gather_apart,
    take_whole_dictionaries,
    train_alike,
)
from azureml_strategy.strategies.process_group import end_subgroup


def _sharding_again(name: str) -> Callable[..., Any]:
    """Return a step of an evaluation, after which all parameters are shards again."""

    def step(self: AzureMLModelParallelStrategy, *args: Any, **kwargs: Any) -> Any:
        outputs = getattr(super(AzureMLModelParallelStrategy, self), name)(*args, **kwargs)
        self._shard_again()
        return outputs

    return step


class AzureMLModelParallelStrategy(LaunchedStrategy, EqualBuffersStrategy, ModelParallelStrategy):
    """Parameters sharded over nodes, layers cut inside a node: `Trainer(strategy="azureml_model_parallel")`.

    Lightning's ModelParallelStrategy with nodes, processes and ranks from the Azure ML job. A module that spreads its
    parameters in `configure_model` works as with Lightning's. The strategy spreads any other module itself: it cuts the
    layers of its `tensor_parallel_plan` over the ranks of a tensor-parallel group, then shards each of its
    `sharded_blocks` and the rest over the data-parallel ranks (`azureml_strategy.strategies.model_parallel.layout`).

    Args:
        data_parallel_size: replicas that read different samples; `auto` is what the other sizes leave.
        tensor_parallel_size: ranks that compute a replica together; `auto` is what a given `data_parallel_size` leaves,
            otherwise all processes of a node for a module with a plan of its own, and 1 for any other and with
            sequence parallelism. A model of transformers is cut by its own plan.
        sequence_parallel_size: ranks that compute each sequence together, a part of its tokens each, for
            `LanguageModel`, causal language models of transformers, and modules with `cut_sequences`.
        tensor_parallel_across_nodes: allow groups that span nodes; they wait for the network in every layer.
        activation_checkpointing: keep only the inputs of each sharded block, and recompute the rest in the backward
            pass.
        broadcast_buffers: give all ranks the first one's buffers, as DDP does; see
            `azureml_strategy.strategies.equal_buffers`.
        save_distributed_checkpoint: save a folder to which each rank writes its part; False gathers one file on rank 0.
        cluster_environment: replaces the environment that the job's launch gives.
        require_infiniband: stop a multi-node job unless NCCL carries it over InfiniBand, instead of warning.
        compile: `blocks` compiles each kind of repeated block once, inside of FSDP2's gathering; `off` nothing. See
            `azureml_strategy.strategies.compilation`.
        compile_mode: of torch.compile; None for its default.
        kwargs: further arguments of Lightning's strategy: `process_group_backend`, `timeout`.

    Raises:
        LaunchError: the job's variables give no rank to trust or contradict the Trainer.
        ConfigurationError: at the start of training, if the sizes or the plan do not fit the job or the module.
    """

    def __init__(
        self,
        *,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        sequence_parallel_size: int = 1,
        tensor_parallel_across_nodes: bool = False,
        activation_checkpointing: bool = False,
        broadcast_buffers: bool = True,
        save_distributed_checkpoint: bool = True,
        cluster_environment: ClusterEnvironment | None = None,
        require_infiniband: bool = False,
        compile: Compile | bool | None = "off",  # noqa: A002 - torch's word for it
        compile_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            cluster_environment=cluster_environment,
            require_infiniband=require_infiniband,
            save_distributed_checkpoint=save_distributed_checkpoint,
            compile=compile,
            compile_mode=compile_mode,
            **kwargs,
        )
        if self._compilation.how == "whole":
            raise ConfigurationError(
                "compile='whole' has one graph for a network, and FSDP2 gathers parameters between its parts. Write "
                "compile='blocks'."
            )
        self._asked_sizes = (data_parallel_size, tensor_parallel_size)
        self._sequence_parallel_size = sequence_parallel_size
        self._sequence_mesh: DeviceMesh | None = None
        self._across_nodes = tensor_parallel_across_nodes
        self._activation_checkpointing = activation_checkpointing
        self._broadcast_buffers = broadcast_buffers
        self._undo = ExitStack()  # of changes to the module
        self._uncut: list[nn.Parameter] = []
        self._spread_by_itself = False
        self._gathering: Gathering | None = None
        self._memory: ParameterMemory | None = None

    @property
    @override
    def loads_pretrained(self) -> Way:
        return "in_parts" if self.world_size > 1 else super().loads_pretrained

    @override
    def adapt_precision(self, plugin: Precision) -> Precision:
        return for_meshes(plugin)

    @override
    def setup_environment(self) -> None:
        layout = self._plan_sizes()
        # Lightning's data-parallel axis is that over which parameters are sharded.
        self._data_parallel_size, self._tensor_parallel_size = layout.sharding_size, layout.tensor_parallel_size
        super().setup_environment()
        if layout.sequence_parallel_size > 1:
            sizes = (layout.data_parallel_size, layout.sequence_parallel_size, layout.tensor_parallel_size)
            axes = ("replicas", "sequence_parallel", "tensor_parallel")
            mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=axes)
            self._sequence_mesh = mesh["sequence_parallel"]

    @override
    def setup(self, trainer: Trainer) -> None:
        assert isinstance(self.lightning_module, LightningModule)
        keep_averages(trainer, self.precision_plugin.precision)
        if self._sequence_mesh is not None:
            group = SequenceGroup(self._sequence_mesh.get_group())
            size = self.device_mesh["tensor_parallel"].size()
            self._undo.callback(share_sequences(self.lightning_module, group, size))
        reshard(self.lightning_module)  # after a use outside of a Trainer
        warn_of_lost_hooks(self.lightning_module)
        spread_by_itself = self._spread_by_itself = is_parallel(self.lightning_module)
        precision = self.precision_plugin.precision
        self._undo.callback(mix_sharded_precision(self.lightning_module, precision, self.root_device.type))
        if not spread_by_itself:
            self._fall_back_to_data_parallel()
            self._spread_with_copies(trainer)
        else:
            take_whole_dictionaries(self.lightning_module)
        cut = self.device_mesh["tensor_parallel"].size() > 1
        refuse_callbacks(trainer.callbacks, cut)  # type: ignore[attr-defined]
        if cut and self._activation_checkpointing and self._compilation.is_on:
            raise ConfigurationError(RECOMPUTED_MESH)
        if is_overridden("configure_model", self.lightning_module):
            super().setup(trainer)
        else:
            # Lightning's own setup refuses a module without configure_model: nothing else would have spread it.
            with self.recording_models():
                super(ModelParallelStrategy, self).setup(trainer)
        self._gathering, self._memory = Gathering(self.lightning_module), ParameterMemory(self.lightning_module)
        if self._broadcast_buffers:
            # A module that spreads itself may hold other buffers on each rank of a tensor-parallel group.
            replicas = self.device_mesh["data_parallel"].get_group() if spread_by_itself else None
            self.keep_buffers_equal(self.lightning_module, replicas)

    @override
    def teardown(self) -> None:
        self._undo.close()
        if self._gathering is not None:
            self._gathering.remove()
            self._gathering = self._memory = None
        if self.lightning_module is not None:
            reshard(self.lightning_module)
        super().teardown()

    @property
    @override
    def alike(self) -> int:
        return self.world_size // int(self.distributed_sampler_kwargs["num_replicas"])

    @property
    @override
    def copies(self) -> str:
        # A module that spreads itself may hold other numbers on each rank of a tensor-parallel group.
        mesh = self.device_mesh["tensor_parallel"]
        return f"tensor-parallel rank {mesh.get_local_rank()}" if self._spread_by_itself else ALL_RANKS

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        sharding = self.device_mesh["data_parallel"]
        size = self._sequence_parallel_size
        return {"num_replicas": sharding.size() // size, "rank": sharding.get_local_rank() // size}

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        for mesh in (self._sequence_mesh, self.device_mesh["tensor_parallel"]):
            batch = copy_batch(batch, mesh.get_group()) if mesh is not None and mesh.size() > 1 else batch
        return batch

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            refuse_optimizer(optimizer)
            if not self._spread_by_itself:  # such a module may have other parameters on each rank, such as experts
                train_alike(optimizer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        explain(exception)
        super().on_exception(exception)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        assert self._memory is not None
        self._memory.require_same()
        outputs = super().training_step(*args, **kwargs)
        if not self.lightning_module.automatic_optimization:
            self._shard_again()
        return outputs

    validation_step = _sharding_again("validation_step")
    test_step = _sharding_again("test_step")
    predict_step = _sharding_again("predict_step")

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        assert self._gathering is not None
        self._gathering.before_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self.finish_gradients()  # a precision plugin of the user's class has not done so
        assert self.lightning_module is not None
        if self._uncut and not accumulates(self.lightning_module.trainer):
            copy_gradients(self._uncut, self.device_mesh["tensor_parallel"].get_group())

    def finish_gradients(self) -> None:
        """Reduce the gradients that are left at the end of a backward pass. A second call changes nothing."""
        assert self._gathering is not None
        self._gathering.after_backward()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.equal_before_use()  # from a GPU, the dictionary has copies on the host
        return super().lightning_module_state_dict()

    @property
    @override
    def written_apart(self) -> tuple[str, ...]:
        return WRITTEN_APART if self._save_distributed_checkpoint else ()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = in_plain_types(super().optimizer_state(optimizer))
        # A single file needs plain numbers: it is read before the entries that `to_plain` moves could be put back.
        numbers = not self._save_distributed_checkpoint
        return apply_to_collection(state, np.generic, lambda number: number.item()) if numbers else state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        checkpoint = gather_apart(checkpoint, self._written_by_shards)
        warn_of_unloadable({name: checkpoint[name] for name in self._written_by_shards if name in checkpoint})
        super().save_checkpoint(to_plain(checkpoint, self.written_apart, run_objects(self)), filepath, storage_options)

    def stage_checkpoint(self, checkpoint: dict[str, Any]) -> tuple[Any, WriteStaged] | None:
        """Collect this rank's part of a checkpoint that Lightning gives to `save_checkpoint`.

        Returns:
            The content to copy, and a function that writes the copy. None if the checkpoint is a single file.
        """
        if not self._save_distributed_checkpoint:
            return None
        checkpoint = gather_apart(checkpoint, self._written_by_shards)
        rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        optimizers = {f"optimizer_{i}": each for i, each in enumerate(checkpoint.get("optimizer_states", []))}
        state = {"state_dict": checkpoint["state_dict"], **optimizers}
        warn_of_unloadable(state)
        return (state, rest if self.is_global_zero else None), write_distributed

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        assert self.lightning_module is not None
        weights = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        path, trusted = Path(self.broadcast(checkpoint_path)), weights_only is False
        check_checkpoint(path, weights, self.lightning_module.strict_loading, trusted)
        with reading(weights_only):
            checkpoint = super().load_checkpoint(path, weights_only)
        callbacks = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(each, WeightAveraging) for each in callbacks):
            # The callback reads the averages there, and Lightning has loaded them into the module only.
            checkpoint.setdefault("state_dict", self.lightning_module.state_dict())
        return checkpoint

    @property
    def _written_by_shards(self) -> tuple[str, ...]:
        return ("state_dict", "optimizer_states") if self._save_distributed_checkpoint else ()

    def _spread_with_copies(self, trainer: Trainer) -> None:
        """Spread the module and the copies of it that callbacks have made, as they compute with both."""
        assert self.lightning_module is not None
        copies = copies_in(trainer.callbacks, self.lightning_module)  # type: ignore[attr-defined]
        for each in (*itertools.filterfalse(is_parallel, copies), self.lightning_module):
            self._uncut = spread(
                each,
                self.device_mesh,
                self.root_device,
                precision=self.precision_plugin.precision,
                activation_checkpointing=self._activation_checkpointing,
            )
            take_whole_dictionaries(each)

    def _shard_again(self) -> None:
        assert self._gathering is not None
        self._gathering.after_step()

    def _plan_sizes(self) -> MeshLayout:
        """Return the sizes of the axes, checked against the job and against the module before its layers are made."""
        module = self.lightning_module
        layout = plan_layout(
            *self._asked_sizes,
            num_nodes=self.num_nodes,
            processes_per_node=self.num_processes,
            cuts_tensors=_may_be_cut(module),
            across_nodes=self._across_nodes,
            sequence_parallel_size=self._sequence_parallel_size,
        )
        assert module is not None
        if layout.tensor_parallel_size > 1:
            if not _may_be_cut(module):
                plan_of(module, layout.tensor_parallel_size)
            check_counts(layout.tensor_parallel_size, counts_of(module))
        return layout

    def _fall_back_to_data_parallel(self) -> None:
        """Give all ranks to data parallelism, if `auto` reserved ranks for a module that might have spread itself.

        The layers of `configure_model` are unknown before. A model of transformers is cut only where a size is given.
        """
        assert self.lightning_module is not None
        planned = isinstance(self.lightning_module, HasTensorParallelPlan)
        if self._asked_sizes != ("auto", "auto") or planned or self._tensor_parallel_size == 1:
            return
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1
        assert self._device_mesh is not None
        former = self._device_mesh.get_all_groups()
        axes = ("data_parallel", "tensor_parallel")
        self._device_mesh = init_device_mesh(self.root_device.type, (self.world_size, 1), mesh_dim_names=axes)
        give_device_mesh(self.lightning_module, self._device_mesh)
        used = (dist.group.WORLD, *self._device_mesh.get_all_groups())
        for group in former:
            if all(group is not other for other in used):
                end_subgroup(group)


def _may_be_cut(module: object) -> bool:
    """Whether a module says how to cut it, or spreads its parameters itself."""
    if isinstance(module, HasTensorParallelPlan):
        return True
    return is_overridden("configure_model", module) and not isinstance(module, HasShardedBlocks)
