"""Every private name of DeepSpeed that this package uses, where DeepSpeed has no public way.

`INTERNALS` says what for. Lightning's own strategy for DeepSpeed is in `lightning_internals.py`. This file imports
DeepSpeed only in its functions: our strategies say by themselves that it is missing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

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
