"""The state of Lightning's own callbacks that Lightning leaves out of a checkpoint: saved and restored here.

It also warns of what a resume cannot restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import WarningCache
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from azureml_strategy.control.gather import gather
from azureml_strategy.lightning_internals import (
    DataLoaderIterDataFetcher,
    Stateful,
    data_fetcher,
    epoch_of_last_average,
    finds_unused_parameters,
    first_weights,
    hook_state,
    set_accumulation,
    training_loaders,
)

Kind = TypeVar("Kind")
# Packages whose hooks are known and whose state is kept.
_KNOWN = ("lightning.", "azureml_strategy.")
_warned = WarningCache()


def save(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Collect the state that Lightning leaves out of its checkpoint, for `restore`. Call it between two steps.

    For a pruned module, the checkpoint's weights are replaced by the masked weights, under their usual names.
    """
    module = trainer.lightning_module
    pruned = {}
    if callbacks_of(trainer, ModelPruning):
        pruned = {
            path: {"orig": getattr(layer, f"{name}_orig").detach(), "mask": getattr(layer, f"{name}_mask")}
            for path, layer, name in _pruned(module)
        }
        masked = {path: each["mask"].to(each["orig"].dtype) * each["orig"] for path, each in pruned.items()}
        parts = {f"{path}_{part}" for path in pruned for part in ("orig", "mask")}
        kept = {name: value for name, value in checkpoint["state_dict"].items() if name not in parts}
        checkpoint["state_dict"] = kept | masked
    return {
        "stopped": trainer.should_stop and not any(map(_time_is_up, callbacks_of(trainer, Timer))),
        "frozen": [name for name, each in module.named_parameters() if not each.requires_grad],
        "untracked": [name for name, each in _batch_norms(module) if not each.track_running_stats],
        "pruned": pruned,
    }


def stop_again(trainer: Trainer, state: dict[str, Any]) -> None:
    """Stop a resumed training that was stopped early. A restart of its job must not train it further."""
    if not state["stopped"]:
        return
    trainer.should_stop = True
    rank_zero_info(
        "This training was stopped early (Trainer.should_stop), and its checkpoint is of that moment: nothing is left "
        "to train. To train on nevertheless, go on from an earlier checkpoint, `resume=PATH`, with an EarlyStopping of "
        "more patience."
    )


def restore(trainer: Trainer, state: dict[str, Any], within_epoch: bool) -> None:
    """Restore what `save` returned, after all hooks before the next step have been called.

    `within_epoch` tells whether that step is not the first of its epoch, so that Lightning does not call
    `on_train_epoch_start`.
    """
    module = trainer.lightning_module
    for path, values in state["pruned"].items():
        layer_path, _, weight = path.rpartition(".")
        _prune_again(module.get_submodule(layer_path), weight, values)
    frozen = {name.removesuffix("_orig") for name in state["frozen"]}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.removesuffix("_orig") not in frozen)
    for name, layer in _batch_norms(module):
        layer.track_running_stats = name not in state["untracked"]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler) and within_epoch:
            callback.on_train_epoch_start(trainer, module)
        if isinstance(callback, StochasticWeightAveraging):
            _restart_averaging(trainer, callback)
        if isinstance(callback, ModelPruning):
            _share_first_weights(callback)


def _restart_averaging(trainer: Trainer, callback: StochasticWeightAveraging) -> None:
    """Create the averaging scheduler as in the epoch of the last average, without averaging again.

    Lightning would create it only at the start of the next epoch, and not at all if that is the epoch for BatchNorm.
    Creating the scheduler sets learning rates, so the checkpoint's rates are put back.
    """
    # on_train_end reads this. If the training is complete already, only a previous process has set it.
    set_accumulation(callback, trainer.accumulate_grad_batches)
    epoch = epoch_of_last_average(callback)
    if epoch is None:
        return
    groups = [(group, dict(group)) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    as_then = SimpleNamespace(
        current_epoch=epoch,
        max_epochs=trainer.max_epochs,
        optimizers=trainer.optimizers,
        lr_scheduler_configs=trainer.lr_scheduler_configs,
    )
    callback.on_train_epoch_start(cast(Trainer, as_then), trainer.lightning_module)
    for group, saved in groups:
        group.update(saved)


def _share_first_weights(callback: ModelPruning) -> None:
    """Let the lottery ticket's initial weights share the memory of the trained weights, as in an uninterrupted run.

    Lightning resets a layer by giving it the memory of the initial weights. Further training then changes them too.
    """
    for layer, name, copy in first_weights(callback):
        trained, first = getattr(layer, f"{name}_orig", None), getattr(copy, name)
        if trained is not None and trained.device == first.device:
            first.data = trained.data


def _prune_again(layer: Any, name: str, values: dict[str, torch.Tensor]) -> None:
    mask = values["mask"].to(getattr(layer, name).device)
    prune.custom_from_mask(layer, name, mask)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        getattr(layer, f"{name}_orig").copy_(values["orig"])


def _pruned(module: LightningModule) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the path of each pruned weight, its layer and its name in the layer."""
    for path, layer in module.named_modules():
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, prune.BasePruningMethod):
                yield f"{path}.{hook._tensor_name}".lstrip("."), layer, hook._tensor_name


def _batch_norms(module: LightningModule) -> Iterator[tuple[str, Any]]:
    """Yield the layers whose statistics BaseFinetuning freezes as well."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            yield name, layer


def _time_is_up(timer: Timer) -> bool:
    """Whether a Timer has stopped the training. After a restart it decides again, because its time may be extended."""
    left = timer.time_remaining()
    return left is not None and left <= 0


def callbacks_of(trainer: Trainer, *kinds: type[Kind]) -> list[Kind]:
    """The Trainer's callbacks of some classes, in their order."""
    return [each for each in trainer.callbacks if isinstance(each, kinds)]  # type: ignore[attr-defined]


def warn_of_what_is_lost(trainer: Trainer) -> None:
    """Warn once, on rank 0, if a restart cannot repeat this training exactly. Call it when the loaders are made."""
    reasons = [*_reasons_in_loaders(trainer), *_reasons_in_hooks(trainer), *_reasons_in_ddp(trainer)]
    if reasons:
        listed = "".join(f"\n- {each}" for each in reasons)
        rank_zero_warn(f"After a restart this training goes on, but not exactly as without one:{listed}")


def warn_of_ranks_apart(trainer: Trainer) -> None:
    """Warn on rank 0 if ReduceLROnPlateau follows different values on different ranks.

    This is known only when there are values. It is a collective if the Trainer has such a scheduler.
    """
    scheduled = [(each.monitor, each.scheduler) for each in trainer.lr_scheduler_configs]
    followed = [(name, each) for name, each in scheduled if isinstance(each, ReduceLROnPlateau)]
    states = gather([(each.best, each.num_bad_epochs) for _, each in followed]) if followed else []
    differing = [name for i, (name, _) in enumerate(followed) if len({repr(of_rank[i]) for of_rank in states}) > 1]
    if differing and trainer.is_global_zero:
        _warned.warn(
            f"ReduceLROnPlateau follows another {' and '.join(map(repr, differing))} on each rank. So each has a "
            "learning rate of its own, under DDP soon a model of its own, and a restart goes on from rank 0's: not "
            "exactly as without one. Log what it follows for all ranks: "
            f"self.log({differing[0]!r}, value, sync_dist=True)."
        )


def _reasons_in_loaders(trainer: Trainer) -> Iterator[str]:
    if isinstance(data_fetcher(trainer), DataLoaderIterDataFetcher):
        yield (
            "training_step(self, dataloader_iter) reads as many batches as it likes: within an epoch their number is "
            "not known. Take `batch` instead, or checkpoint at the ends of epochs only."
        )
    loaders = training_loaders(trainer)
    for loader in loaders.flattened if loaders is not None else []:
        lives_on = isinstance(loader, DataLoader) and loader.persistent_workers
        if lives_on and not isinstance(loader, Stateful):
            yield (
                f"the workers of {type(loader).__name__}(persistent_workers=True) go on with random numbers of the "
                "epoch before, which a new process does not have. Where transforms draw any, leave it False."
            )
        # A ResumableLoader, which this package must not import, skips the samples that were read.
        skips = isinstance(loader, DataLoader) and isinstance(loader, Stateful) and _is_ours(loader)
        if skips and loader.num_workers > 0 and not _is_ours(loader.dataset):
            yield (
                f"the workers of {type(loader).__name__} begin within an epoch with other random numbers. Where "
                "transforms draw any, have them follow from the sample's index and the epoch, as those of "
                "azureml_strategy.data.TrainingImages, or use a plain DataLoader, whose batches are read again."
            )


def _is_ours(part: Any) -> bool:
    return type(part).__module__.startswith("azureml_strategy.")


def _reasons_in_hooks(trainer: Trainer) -> Iterator[str]:
    """Report `on_train_epoch_start` hooks: Lightning does not repeat them in an epoch that another process began."""
    callbacks = ((each, Callback) for each in trainer.callbacks)  # type: ignore[attr-defined]
    for owner, base in ((trainer.lightning_module, LightningModule), *callbacks):
        known = type(owner).__module__.startswith(_KNOWN)
        if not known and is_overridden("on_train_epoch_start", owner, base):
            yield (
                f"{type(owner).__name__}.on_train_epoch_start is not called again for an epoch that is taken up in its "
                "middle. What it sets must be in state_dict, or follow from trainer.current_epoch where it is used."
            )


def _reasons_in_ddp(trainer: Trainer) -> Iterator[str]:
    strategy = trainer.strategy
    state = hook_state(strategy) if isinstance(strategy, DDPStrategy) else None
    if state is not None:
        yield (
            f"{type(state).__name__} of DDP's communication hook is not in checkpoints and begins anew. PowerSGD loses "
            "what it has not sent, and sends its first steps exactly; gradient_compression='bf16' has no state."
        )
    sorts = isinstance(strategy, DDPStrategy) and not finds_unused_parameters(strategy)
    # Local SGD has a DistributedDataParallel for its warm-up, and inside a node.
    ranks = strategy.model.process_group.size() if isinstance(strategy.model, DistributedDataParallel) else 1
    if sorts and ranks > 2:
        yield (
            "torch's DDP sorts its buckets anew after the first step of a process, so that more than two ranks add up "
            "in another order: the last bits differ. find_unused_parameters=True keeps it, and costs time."
        )
