"""Every private name of DeepSpeed that this package uses, where DeepSpeed has no public way.

`INTERNALS` says what for. Lightning's own strategy for DeepSpeed is in `lightning_internals.py`. This file imports
DeepSpeed only in its functions: our strategies say by themselves that it is missing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

INTERNALS: dict[str, dict[str, str]] = {
    # What `StageEngine` and `StageModule` use on themselves, some for each micro-batch.
    "deepspeed.runtime.pipe.engine.PipelineEngine": {
        "_INSTRUCTION_MAP": "extended: measures passes, and leaves the optimizer step to Lightning's loop",
        "_compute_loss": "set before an evaluation, as eval_batch does",
        "_exec_backward_pass": "a backward pass, which is measured",
        "_exec_forward_pass": "a forward pass, which is measured",
        "_exec_optimizer_step": "the optimizer step, when Lightning's loop takes it",
        "_exec_reduce_grads": "the reduction over replicas, which is measured",
        "_exec_reduce_tied_grads": "the reduction of what stages share, which is measured",
        "_exec_schedule": "evaluates without eval_batch, which waits for all replicas",
    },
    "deepspeed.runtime.pipe.module.PipelineModule": {
        "_local_start": "the index of the stage's first layer in the chain",
        "_partition_layers": "overridden: the chain is cut already",
        "_set_bounds": "tells DeepSpeed where",
    },
    # What the functions below use.
    "deepspeed.ops": {
        "__compatible_ops__": "which operations DeepSpeed would compile",
    },
    "deepspeed.runtime.engine.DeepSpeedEngine": {
        "_config": "the configuration of an engine that exists, to change what it loads",
    },
    "deepspeed.runtime.zero.partition_parameters.Init": {
        "_zero_init_param": "extended: casts the parameters of a layer before they are cut",
    },
    "deepspeed.utils.groups": {
        "_release_process_group_references": "forgets the groups of a former Trainer, which may be destroyed",
    },
}


def compile_no_operations() -> None:
    """Keep DeepSpeed from compiling operations for the CPU.

    It would take two minutes to compile its shared-memory all-reduce. Only inference and tensor parallelism call it,
    and gloo's replaces it. Asking DeepSpeed what else it can compile starts compilers too.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


def forget_groups() -> None:
    """Make DeepSpeed create its process groups anew.

    It keeps the groups of this process's last Trainer, but they may be destroyed, or cut for tensor parallelism.
    """
    from deepspeed.utils import groups

    groups._release_process_group_references()


def load_universal_checkpoint(engine: DeepSpeedEngine) -> None:
    """Make an engine load universal checkpoints. It reads this flag when it loads, and nothing else depends on it."""
    engine._config.load_universal_checkpoint = True


def zero_init(config: dict[str, Any], remote_device: str | None) -> AbstractContextManager[Any]:
    """Cut the parameters of each layer as it is built, by `deepspeed.zero.Init`, and leave buffers what they are.

    With bf16, DeepSpeed would make every tensor of a constructor bf16: positions above 256, rotary frequencies and
    running statistics would be rounded, which training keeps in float32, and weights would be drawn in bf16. Here the
    parameters of a layer are cast when its constructor has ended.

    Args:
        config: DeepSpeed's configuration.
        remote_device: where the parts of parameters lie, `cpu` or `nvme`; None is the device.
    """
    import deepspeed
    from deepspeed.runtime.zero import DeepSpeedTensorOverride

    class CastingInit(deepspeed.zero.Init):  # type: ignore[misc] # DeepSpeed has no annotations
        def _zero_init_param(self, param: nn.Parameter) -> None:
            if param.is_floating_point():
                param.data = param.data.to(self.dtype)
            super()._zero_init_param(param)

    overrides = [DeepSpeedTensorOverride.device]
    context: AbstractContextManager[Any] = CastingInit(
        remote_device=remote_device, config_dict_or_path=config, tensor_overrides=overrides
    )
    return context


class FlatSlice:
    """The numbers of a flattened gradient, one after the other, that this rank keeps under ZeRO.

    Args:
        parameter: one that `is_of_zero`.

    Attributes:
        start: the first number of the slice.
        group_size: ranks that keep slices of one gradient.
        scale: what DeepSpeed has multiplied the loss with, in float16.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._of_stage_3 = hasattr(parameter, "ds_id")
        self._parameter = cast(Any, parameter)
        group = self._parameter.ds_process_group if self._of_stage_3 else self._parameter._dp_group
        self.group_size = dist.get_world_size(group)
        optimizer = _zero_optimizer(parameter)
        self.scale = 1.0 if optimizer is None else float(optimizer.loss_scale)
        if self._of_stage_3:
            self.start = dist.get_rank(group) * self._parameter.ds_tensor.numel()
        else:
            mapping = self._parameter._hp_mapping
            self.start = 0 if mapping is None else mapping.lp_fragment_address.start

    def read(self) -> Tensor | None:
        """Return the slice or a copy of it; None if this rank keeps no number of the gradient."""
        if self._of_stage_3:
            part: Tensor = self._parameter._z3_optimizer.get_local_fp32_grad_for_param(self._parameter)
            return part
        mapping = self._parameter._hp_mapping
        if mapping is None:
            return None
        kept: Tensor = mapping.get_lp_grad_fragment(self._parameter._index_in_param_group).view(-1)
        length = mapping.lp_fragment_address.numel
        # The bfloat16 optimizer keeps whole gradients.
        return kept if kept.numel() == length else kept.narrow(0, self.start, length)

    def write(self, part: Tensor) -> None:
        """Replace the slice."""
        optimizer = _zero_optimizer(self._parameter)
        if self._of_stage_3:
            optimizer.set_local_grad_for_param(part, self._parameter)
            return
        kept = self.read()
        assert kept is not None
        kept.copy_(part)
        if getattr(optimizer, "cpu_offload", False):
            # On the host, DeepSpeed takes the norm and looks for infinities when the gradient arrives.
            optimizer.norm_for_param_grads[optimizer.get_param_id(self._parameter)] = torch.linalg.vector_norm(
                kept, dtype=torch.float32
            )
            optimizer.update_offload_overflow_tracker(kept)

    def gather(self) -> Tensor:
        """Return the whole gradient in float32; a collective of the ranks that keep slices."""
        if self._of_stage_3:
            whole: Tensor = self._parameter._z3_optimizer.get_fp32_grad_for_param(self._parameter)
        else:
            whole = self._parameter.get_full_hp_grad()
        return whole


def is_of_zero(parameter: nn.Parameter) -> bool:
    """Tell whether DeepSpeed keeps the gradient of a parameter: ZeRO's optimizer trains it, or the bfloat16 one."""
    if hasattr(parameter, "ds_id"):
        optimizer = _zero_optimizer(parameter)
        return optimizer is not None and optimizer.get_param_id(parameter) in optimizer.grad_position
    return hasattr(parameter, "_hp_mapping")


def has_gradients(parameter: nn.Parameter) -> bool:
    """Tell whether this is between the last backward pass of a step and the step. With offload, nothing tells."""
    optimizer: Any = _zero_optimizer(parameter)
    kept = getattr(optimizer, "averaged_gradients", None)
    offloads = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    return kept is None or bool(offloads) or any(each is not None for each in kept.values())


def float32_copy(parameter: nn.Parameter) -> Tensor | None:
    """Return the whole gradient that the bfloat16 optimizer keeps on each rank; None if another optimizer trains it."""
    return getattr(parameter, "_hp_grad", None)


def drop_stale_gradients(engine: DeepSpeedEngine) -> None:
    """Empty the slices on the host to which no gradient came, before a step. DeepSpeed has a norm of each that did.

    It copies gradients into buffers as they come, and ZeRO 3 and offloaded optimizers never empty them: a layer that
    was used once would be trained by the same gradient in each later step.
    """
    optimizer: Any = engine.optimizer
    if getattr(optimizer, "cpu_offload", False):
        for group, parameters in enumerate(optimizer.params_in_partition):
            for parameter, kept in zip(parameters, optimizer.offload_gradient_dict[group], strict=True):
                if optimizer.get_param_id(parameter) not in optimizer.norm_for_param_grads:
                    kept.zero_()
    elif getattr(optimizer, "offload_optimizer", False):
        for number, (group, start, length) in optimizer.grad_position.items():
            kept = optimizer.fp32_partitioned_groups_flat[group].grad
            if kept is not None and number not in optimizer.norm_for_param_grads:
                kept.narrow(0, start, length).zero_()


def forget_gradients(engine: DeepSpeedEngine) -> None:
    """Empty ZeRO 3's slices of gradients, after a step."""
    optimizer: Any = engine.optimizer
    kept = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if kept is not None:
        kept.zero_()
        if optimizer.offload_optimizer:
            optimizer.norm_for_param_grads.clear()  # as ZeRO 1 and 2 do


def _zero_optimizer(parameter: nn.Parameter) -> Any:
    """Return ZeRO's optimizer; None if this rank keeps nothing of the parameter's gradient."""
    return getattr(parameter, "_z3_optimizer", getattr(parameter, "_zero_optimizer", None))
