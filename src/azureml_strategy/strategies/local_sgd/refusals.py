"""Refuses, before training starts, what replicas that train by themselves cannot do. Each message says what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch.optim import LBFGS, Optimizer

from azureml_strategy.control.gather import gather
from azureml_strategy.network import read_hcas
from azureml_strategy.strategies.errors import ConfigurationError

ONE_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
"""NCCL's variable that keeps the operations of several groups in the order of their launches."""


def refuse_unsupported(trainer: Trainer, module: LightningModule, sync_batchnorm: bool) -> None:
    """Refuse modules, callbacks and arguments of the Trainer that do not go together with local SGD."""
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} optimizes manually, so that nobody but the module knows which of its steps ends "
            "a period. Use automatic optimization, or strategy='azureml_ddp'."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ConfigurationError(
                f"{type(callback).__name__} averages over the steps of one replica, and local SGD over replicas: the "
                "average of a replica's own steps would be another on each rank. Leave the callback out, or use "
                "strategy='azureml_ddp'."
            )
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} prunes by the weights of one replica, and each replica has others: their "
                "average would not be pruned. Prune under strategy='azureml_ddp'."
            )
    if sync_batchnorm:
        raise ConfigurationError(
            "Trainer(sync_batchnorm=True) has all ranks wait for one another in each forward pass, while local SGD is "
            "to spare them that. Leave it out: running statistics are averaged with the parameters."
        )


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse an optimizer whose state is wrong once weights are averaged."""
    if any(isinstance(each, LBFGS) for each in optimizers):
        raise ConfigurationError(
            "LBFGS learns the curvature from the differences between its own steps, which averages of replicas would "
            "be mixed into. Use another optimizer, or strategy='azureml_ddp'."
        )


def refuse_infiniband(num_nodes: int) -> None:
    """Refuse several nodes with InfiniBand, where averaging less often saves little and costs accuracy.

    A collective; the error is raised on all ranks.
    """
    if num_nodes == 1:
        return
    adapters = [each.name for each in read_hcas() if each.usable]
    found: list[str] = next((names for names in gather(adapters) if names), [])
    if found:
        raise ConfigurationError(
            f"These nodes have InfiniBand ({', '.join(found)}). Gradients travel faster there than they are computed, "
            "so that local SGD would cost accuracy and save nothing. Use strategy='azureml_ddp'; or say "
            "allow_infiniband=True (strategy.allow_infiniband=true in a recipe) where you have measured otherwise."
        )


def refuse_unordered_nccl(version: tuple[int, ...]) -> None:
    """Refuse delayed exchanges on GPUs where NCCL cannot keep the operations of two groups in one order.

    A delayed exchange runs while the training uses its own groups. NCCL 2.26 and newer start the operations of all
    groups on the GPU as they were launched, if NCCL_LAUNCH_ORDER_IMPLICIT is set before its first operation (NCCL user
    guide, "Using multiple NCCL communicators concurrently"). Older ones may deadlock.
    """
    if version < (2, 26):
        raise ConfigurationError(
            f"delay needs NCCL 2.26 or newer, and this is {'.'.join(map(str, version))}, which may deadlock where an "
            "exchange runs beside other collectives. Leave delay out, use a newer torch, or say "
            "process_group_backend='gloo'."
        )
    given = os.environ.get(ONE_ORDER)
    if given != "1":
        why = f"{ONE_ORDER}={given}" if given else "an earlier training of this process has started NCCL without it"
        raise ConfigurationError(
            f"delay needs {ONE_ORDER}=1 before NCCL starts, or NCCL may deadlock where an exchange runs beside other "
            f"collectives; but {why}. Set the variable to 1 for the whole process, or leave delay out."
        )


def refuse_unequal_batches(batches: float) -> None:
    """Refuse ranks with unequal numbers of batches in an epoch. A collective; the error is raised on all ranks.

    Args:
        batches: of this rank; infinite if its loader has no length.
    """
    numbers = gather(batches)
    if len(set(numbers)) > 1:
        listed = ", ".join(f"rank {rank} has {number:g}" for rank, number in enumerate(numbers))
        raise ConfigurationError(
            f"The ranks have unequal numbers of batches in an epoch: {listed}. Replicas average after equally many "
            "optimizer steps, so that one would wait for ever. Leave the sampler to the Trainer "
            f"(use_distributed_sampler=True), or write Trainer(limit_train_batches={int(min(numbers))})."
        )


def refuse_long_period(period: int, warmup_steps: int, steps: float) -> None:
    """Refuse a first period that does not end within the run. A run that is all warm-up is DDP, and has no period.

    Args:
        period: optimizer steps.
        warmup_steps: optimizer steps before the first period.
        steps: optimizer steps of the whole run; infinite if it has no end, below 0 if its end is not known.
    """
    if warmup_steps < steps < warmup_steps + period:
        raise ConfigurationError(
            f"The run has {steps:g} optimizer steps, {warmup_steps} of warm-up, and then a period of {period}: the "
            "replicas would never average before it ends. Give a shorter period (strategy.period=N in a recipe) or "
            "train for longer."
        )
