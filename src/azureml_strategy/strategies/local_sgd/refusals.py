"""Refuses, before training starts, what replicas that train by themselves cannot do. Each message has a way out."""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from azureml_strategy.control.gather import gather
from azureml_strategy.network import read_hcas
from azureml_strategy.strategies.errors import ConfigurationError


def refuse_unsupported(trainer: Trainer, module: LightningModule, sync_batchnorm: bool) -> None:
    """Raise an error for the first thing that does not go together with local SGD.

    Args:
        trainer: about to fit.
        module: what it trains.
        sync_batchnorm: as in `Trainer(sync_batchnorm=...)`.

    Raises:
        ConfigurationError: there is such a thing.
    """
    for words in _found(trainer, module, sync_batchnorm):
        raise ConfigurationError(words)


def _found(trainer: Trainer, module: LightningModule, sync_batchnorm: bool) -> Iterator[str]:
    if not module.automatic_optimization:
        yield (
            f"{type(module).__name__} optimizes manually, so that nobody but the module knows which of its steps ends "
            "a period. Use automatic optimization, or strategy='azureml_ddp'."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            yield (
                f"{type(callback).__name__} averages over the steps of one replica, and local SGD over replicas: the "
                "average of a replica's own steps would be another on each rank. Leave the callback out, or use "
                "strategy='azureml_ddp'."
            )
    if sync_batchnorm:
        yield (
            "Trainer(sync_batchnorm=True) has all ranks wait for one another in each forward pass, while local SGD is "
            "to spare them that. Leave it out: running statistics are averaged with the parameters."
        )


def refuse_infiniband(num_nodes: int) -> None:
    """Refuse a job of several nodes with InfiniBand, where averaging less often saves little and costs accuracy.

    A collective.

    Raises:
        ConfigurationError: on all ranks, if a node has an adapter that can be used.
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


def refuse_unequal_batches(batches: float) -> None:
    """Refuse ranks that have unequal numbers of batches in an epoch. A collective.

    Args:
        batches: of this rank; infinite if its loader does not say.

    Raises:
        ConfigurationError: on all ranks.
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
    """Refuse a first period that does not end within the run. A run that is all warm-up is DDP, and has none.

    Args:
        period: optimizer steps.
        warmup_steps: steps before the first period.
        steps: of the whole run; infinite if it has no end, below 0 if its end is not known.

    Raises:
        ConfigurationError: no average would be taken before the end.
    """
    if warmup_steps < steps < warmup_steps + period:
        raise ConfigurationError(
            f"The run has {steps:g} optimizer steps, {warmup_steps} of warm-up, and then a period of {period}: the "
            "replicas would never average before it ends. Give a shorter period (strategy.period=N in a recipe) or "
            "train for longer."
        )
