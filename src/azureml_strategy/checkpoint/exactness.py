"""What of a training no checkpoint can bring back: said when it can be known, not found out after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import WarningCache
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from azureml_strategy.checkpoint.random_state import gather

# Hooks of these are known, and their state is kept.
_KNOWN = ("lightning.", "azureml_strategy.")
_apart = WarningCache()


def warn_of_what_is_lost(trainer: Trainer) -> None:
    """One warning, on rank 0, if a restart of this training cannot repeat it exactly.

    Args:
        trainer: about to train, with its loaders made.
    """
    reasons = [*_of_loaders(trainer), *_of_hooks(trainer), *_of_ddp(trainer)]
    if reasons:
        listed = "".join(f"\n- {each}" for each in reasons)
        rank_zero_warn(f"After a restart this training goes on, but not exactly as without one:{listed}")


def warn_of_ranks_apart(trainer: Trainer) -> None:
    """A warning, on rank 0, if ranks follow values of their own with their learning rates; a collective where any do.

    That is known when the values are there, not at the start.

    Args:
        trainer: in training.
    """
    scheduled = [(each.monitor, each.scheduler) for each in trainer.lr_scheduler_configs]
    followed = [(name, each) for name, each in scheduled if isinstance(each, ReduceLROnPlateau)]
    seen = gather([(each.best, each.num_bad_epochs) for _, each in followed]) if followed else []
    apart = [name for i, (name, _) in enumerate(followed) if len({repr(of_rank[i]) for of_rank in seen}) > 1]
    if apart and trainer.is_global_zero:
        _apart.warn(
            f"ReduceLROnPlateau follows another {' and '.join(map(repr, apart))} on each rank. So each has a learning "
            "rate of its own, under DDP soon a model of its own, and a restart goes on from rank 0's: not exactly as "
            f"without one. Log what it follows for all ranks: self.log({apart[0]!r}, value, sync_dist=True)."
        )


def _of_loaders(trainer: Trainer) -> Iterator[str]:
    if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
        yield (
            "training_step(self, dataloader_iter) reads as many batches as it likes: within an epoch their number is "
            "not known. Take `batch` instead, or checkpoint at the ends of epochs only."
        )
    loaders = trainer.fit_loop._combined_loader
    for loader in loaders.flattened if loaders is not None else []:
        lives_on = isinstance(loader, DataLoader) and loader.persistent_workers
        if lives_on and not isinstance(loader, _Stateful):
            yield (
                f"the workers of {type(loader).__name__}(persistent_workers=True) go on with random numbers of the "
                "epoch before, which a new process does not have. Where transforms draw any, leave it False."
            )
        if _begins_within_epoch(loader) and loader.num_workers > 0 and not _is_ours(loader.dataset):
            yield (
                f"the workers of {type(loader).__name__} begin within an epoch with other random numbers. Where "
                "transforms draw any, have them follow from the sample's index and the epoch, as those of "
                "azureml_strategy.data.TrainingImages, or use a plain DataLoader, whose batches are read again."
            )


def _begins_within_epoch(loader: Any) -> bool:
    """Whether it leaves out what was read: a ResumableLoader, which this room does not know."""
    return isinstance(loader, DataLoader) and isinstance(loader, _Stateful) and _is_ours(loader)


def _is_ours(part: Any) -> bool:
    return type(part).__module__.startswith("azureml_strategy.")


def _of_hooks(trainer: Trainer) -> Iterator[str]:
    """Lightning does not call it again in an epoch that was begun by another process."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owners = [(trainer.lightning_module, LightningModule), *((each, Callback) for each in callbacks)]
    for owner, base in owners:
        known = type(owner).__module__.startswith(_KNOWN)
        if not known and is_overridden("on_train_epoch_start", owner, base):
            yield (
                f"{type(owner).__name__}.on_train_epoch_start is not called again for an epoch that is taken up in its "
                "middle. What it sets must be in state_dict, or follow from trainer.current_epoch where it is used."
            )


def _of_ddp(trainer: Trainer) -> Iterator[str]:
    strategy = trainer.strategy
    sorts = isinstance(strategy, DDPStrategy) and not strategy._ddp_kwargs.get("find_unused_parameters")
    if sorts and trainer.world_size > 2:
        yield (
            "torch's DDP sorts its buckets anew after the first step of a process, so that more than two ranks add up "
            "in another order: the last bits differ. find_unused_parameters=True keeps it, and costs time."
        )
