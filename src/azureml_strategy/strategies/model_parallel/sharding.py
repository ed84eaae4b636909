"""Shards a module's parameters, gradients and optimizer state over the data-parallel ranks (FSDP2)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

# What Lightning calls of a module instead of its forward.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def is_parallel(module: nn.Module) -> bool:
    """Whether any parameter is spread over ranks already."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def checkpoint_activations(blocks: Sequence[nn.Module]) -> None:
    """Keep only the inputs of each block, and compute the rest again in the backward pass."""
    for block in blocks:
        # FSDP's hooks lie around it, so that a block is gathered once for all of its backward pass
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def shard_parameters(module: nn.Module, mesh: DeviceMesh, blocks: Sequence[nn.Module], precision: str) -> None:
    """Shard each block, and what is left of the module as one more.

    Args:
        module: a LightningModule; its four steps gather what belongs to no block, as its forward does.
        mesh: of one dimension, the data-parallel one. With one rank there is nothing to share out, but all parameters
            become DTensors, which torch's foreach and fused optimizers do not take beside plain ones.
        blocks: gathered one at a time, forward and backward.
        precision: the Trainer's.
    """
    half = {"bf16-mixed": torch.bfloat16}.get(precision)
    inside = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=inside)
    # a batch is not cast: its floats may be targets
    around = MixedPrecisionPolicy(inside.param_dtype, inside.reduce_dtype, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, mp_policy=around)
    for step in _STEPS:
        register_fsdp_forward_method(module, step)
