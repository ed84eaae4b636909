"""Optimizer settings and learning-rate schedules of the recipes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfigType
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from azureml_strategy.cluster.data_parallel import batch_size_of, data_parallel_size

# The batch size that published ResNet-50 learning rates refer to: Goyal et al. 2017, section 2.1
# (https://arxiv.org/abs/1706.02677): "0.1 for 256 images".
REFERENCE_BATCH = 256


def scaled_learning_rate(learning_rate: float, global_batch: int) -> float:
    """Scale the peak learning rate linearly with the global batch (Goyal et al. 2017).

    Args:
        learning_rate: for `REFERENCE_BATCH` samples per step.
        global_batch: samples per step over all replicas, gradient accumulation included.
    """
    return learning_rate * global_batch / REFERENCE_BATCH


def warmup_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the share of the peak learning rate that a step uses.

    It rises linearly from `1 / warmup_steps` to 1 over the warm-up (Goyal et al. 2017, section 2.2), then falls to zero
    along half a cosine (Loshchilov and Hutter 2016, https://arxiv.org/abs/1608.03983, no restarts).

    Args:
        step: optimizer steps already taken, from 0.
        warmup_steps: steps of the warm-up. A run that ends before it never reaches the peak.
        total_steps: steps of the whole run, warm-up included. From there on the share is 0.0.

    Returns:
        Between 0 and 1.
    """
    if step >= total_steps:
        return 0.0
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps)))


def decay_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Make parameter groups for an optimizer, without weight decay on normalisations and biases.

    Those are the parameters with one dimension. Decaying them costs accuracy at large batches (Jia et al. 2018, section
    3.1, https://arxiv.org/abs/1807.11205).

    Args:
        network: only its parameters that require gradients are used.
        weight_decay: of the parameters with two or more dimensions.

    Returns:
        One or two groups; an empty one is left out.
    """
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in parameters if _dimensions(parameter) > 1]
    others = [parameter for parameter in parameters if _dimensions(parameter) <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def fused(
    kind: type[Optimizer], groups: Sequence[Mapping[str, Any]], chosen: bool | None, precision: object
) -> bool | None:
    """Return what an optimizer of torch is to be given as `fused`: one kernel for a step, or None for torch's default.

    Without a choice it is True where all parameters are on GPUs. DTensors of two meshes, as tensor parallelism leaves
    them, cannot be in one kernel, and torch's SGD has none for DTensors.
    Under `16-mixed` a fused optimizer would divide the gradients by GradScaler's factor
    itself, after they are clipped, so Lightning refuses to clip them.

    Args:
        kind: of the optimizer.
        groups: of parameters.
        chosen: True or False if a user has decided, None if not.
        precision: the Trainer's.
    """
    if chosen is not None:
        return chosen
    parameters = [parameter for group in groups for parameter in group["params"]]
    on_gpus = all(parameter.device.type == "cuda" for parameter in parameters)
    meshes = {getattr(parameter, "device_mesh", None) for parameter in parameters}
    one_kernel = meshes == {None} or (len(meshes) == 1 and kind is not SGD)
    return True if on_gpus and one_kernel and precision != "16-mixed" else None


def keep_fused(optimizer: Optimizer, precision: object) -> None:
    """Keep an optimizer's `fused` when a state is loaded, which has that of the device on which it was saved.

    Lightning clips no gradients in mixed precision if the optimizer may divide them by GradScaler's factor in its step.
    Only `16-mixed` has a GradScaler, so in other precisions the optimizer says that it does not.

    Args:
        optimizer: one of torch's that can be fused.
        precision: the Trainer's.
    """
    optimizer.register_load_state_dict_pre_hook(_with_own_fused)
    if precision != "16-mixed":
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def _with_own_fused(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    groups, own = state["param_groups"], [group["fused"] for group in optimizer.param_groups]
    if len(groups) != len(own):
        return state  # torch refuses it, as long as it has all of its groups
    pairs = zip(groups, own, strict=True)
    return {**state, "param_groups": [{**group, "fused": how} for group, how in pairs]}


def warmup_cosine_schedule(optimizer: Optimizer, warmup_steps: int, total_steps: int) -> LRSchedulerConfigType:
    """Return `warmup_cosine` for an optimizer, in the form of `configure_optimizers`, stepped at every step."""
    factor = functools.partial(warmup_cosine, warmup_steps=warmup_steps, total_steps=total_steps)
    return {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}


def total_steps(trainer: Trainer) -> int:
    """Number of optimizer steps of the whole run.

    Raises:
        ValueError: the run has no end that can be counted in steps.
    """
    steps = trainer.estimated_stepping_batches
    if not 0 < steps < math.inf:
        raise ValueError(
            f"The number of training steps is not known (max_epochs={trainer.max_epochs}, "
            f"max_steps={trainer.max_steps}, {trainer.num_training_batches} batches an epoch), and a cosine "
            "decay needs an end. Give one: Trainer(max_steps=...), or max_epochs=... and a dataloader with a "
            "length."
        )
    return int(steps)


def warmup_steps(trainer: Trainer, epochs: float) -> int:
    """Number of optimizer steps of a warm-up.

    Args:
        trainer: about to train.
        epochs: length of the warm-up; may be a fraction.

    Raises:
        ValueError: the train dataloader has no length, so an epoch has no number of steps.
    """
    batches = epochs * trainer.num_training_batches if epochs else 0.0
    if batches == math.inf:
        raise ValueError(
            f"warmup_epochs={epochs} cannot be counted in steps: the train dataloader has no length. Give it "
            "a length, or set warmup_epochs=0."
        )
    return round(batches / trainer.accumulate_grad_batches)


def global_batch(trainer: Trainer) -> int:
    """Samples of one optimizer step over all replicas, gradient accumulation included.

    Raises:
        ValueError: the train dataloader does not say its batch size.
    """
    loader = trainer.train_dataloader
    batch_size = batch_size_of(loader)
    if batch_size is None:
        raise ValueError(
            f"The batch size of the train dataloader ({type(loader).__name__}) is not known, and the "
            "learning rate is scaled by the global batch. Return one DataLoader(batch_size=...) from "
            "train_dataloader, or give your loader or batch sampler an attribute `batch_size`: samples a step "
            "and process."
        )
    return batch_size * data_parallel_size(trainer) * trainer.accumulate_grad_batches


def _dimensions(parameter: nn.Parameter) -> int:
    # Under ZeRO-3 the remaining parameter is flat and empty. DeepSpeed keeps its shape in `ds_shape`.
    return len(getattr(parameter, "ds_shape", parameter.shape))
