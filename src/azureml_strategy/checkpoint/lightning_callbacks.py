"""What Lightning's own callbacks change and do not save: without it a resumed run is another one, in silence."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn.utils import prune


def save(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Collect it, between two steps.

    Args:
        trainer: in training.
        checkpoint: Lightning's; of a pruned module it gets the weights as they are used, under their usual names.

    Returns:
        What `restore` takes.
    """
    module = trainer.lightning_module
    pruned = {}
    if any(isinstance(each, ModelPruning) for each in _callbacks(trainer)):
        pruned = {path: _values(layer, name) for path, layer, name in _pruned(module)}
        checkpoint["state_dict"] = _as_used(checkpoint["state_dict"], pruned)
    return {
        "stopped": trainer.should_stop and not any(_time_is_up(each) for each in _callbacks(trainer)),
        "frozen": [name for name, each in module.named_parameters() if not each.requires_grad],
        "untracked": [name for name, each in _batch_norms(module) if not each.track_running_stats],
        "pruned": pruned,
    }


def stop_again(trainer: Trainer, state: dict[str, Any]) -> None:
    """A training that was stopped early is over, when its job is started again as well."""
    if not state["stopped"]:
        return
    trainer.should_stop = True
    rank_zero_info(
        "This training was stopped early (Trainer.should_stop), and its checkpoint is of that moment: nothing is left "
        "to train. To train on nevertheless, go on from an earlier checkpoint, `resume=PATH`, with an EarlyStopping of "
        "more patience."
    )


def restore(trainer: Trainer, state: dict[str, Any], within_epoch: bool) -> None:
    """Put it back, when all hooks before the next step have been called.

    Args:
        trainer: in a resumed `fit`, with everything restored that Lightning restores.
        state: what `save` gave.
        within_epoch: whether the next step is not the first of an epoch, so that no `on_train_epoch_start` comes.
    """
    module = trainer.lightning_module
    _prune_again(module, state["pruned"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.removesuffix("_orig") not in _without_suffix(state["frozen"]))
    for name, layer in _batch_norms(module):
        layer.track_running_stats = name not in state["untracked"]
    for callback in _callbacks(trainer):
        if isinstance(callback, GradientAccumulationScheduler) and within_epoch:
            callback.on_train_epoch_start(trainer, module)
        if isinstance(callback, StochasticWeightAveraging):
            _restart_averaging(trainer, callback)
        if isinstance(callback, ModelPruning):
            _share_first_weights(callback)


def _restart_averaging(trainer: Trainer, callback: StochasticWeightAveraging) -> None:
    """Have it make its scheduler, as in the epoch in which it averaged last, without averaging once more.

    Lightning has it do so in the next epoch that begins, if that is not the one for BatchNorm. And the scheduler sets
    learning rates when it is made; those of the checkpoint are the right ones.
    """
    # When the training is complete, its on_train_end asks for what it set in an epoch of another process.
    callback._accumulate_grad_batches = trainer.accumulate_grad_batches
    if callback._scheduler_state is None:
        return
    groups = [(group, dict(group)) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    as_then = SimpleNamespace(
        current_epoch=callback._latest_update_epoch,
        max_epochs=trainer.max_epochs,
        optimizers=trainer.optimizers,
        lr_scheduler_configs=trainer.lr_scheduler_configs,
    )
    callback.on_train_epoch_start(cast(Trainer, as_then), trainer.lightning_module)
    for group, saved in groups:
        group.update(saved)


def _share_first_weights(callback: ModelPruning) -> None:
    """The lottery ticket's weights to begin with: Lightning gives the layer their memory, which then trains them."""
    if callback._resample_parameters:
        return
    for layer in (callback._original_layers or {}).values():
        for index, name in layer["names"]:
            trained = getattr(callback._parameters_to_prune[index][0], f"{name}_orig", None)
            first = getattr(layer["data"], name)
            if trained is not None and trained.device == first.device:
                first.data = trained.data


def _prune_again(module: LightningModule, pruned: dict[str, dict[str, torch.Tensor]]) -> None:
    for path, values in pruned.items():
        layer_path, _, name = path.rpartition(".")
        layer = module.get_submodule(layer_path)
        mask = values["mask"].to(getattr(layer, name).device)
        prune.custom_from_mask(layer, name, mask)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            getattr(layer, f"{name}_orig").copy_(values["orig"])


def _pruned(module: LightningModule) -> Iterator[tuple[str, nn.Module, str]]:
    """The path of each pruned weight, its layer and its name there."""
    for path, layer in module.named_modules():
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, prune.BasePruningMethod):
                yield f"{path}.{hook._tensor_name}".lstrip("."), layer, hook._tensor_name


def _values(layer: nn.Module, name: str) -> dict[str, torch.Tensor]:
    return {"orig": getattr(layer, f"{name}_orig").detach(), "mask": getattr(layer, f"{name}_mask")}


def _as_used(state_dict: dict[str, Any], pruned: dict[str, dict[str, torch.Tensor]]) -> dict[str, Any]:
    left_out = {f"{path}_{part}" for path in pruned for part in ("orig", "mask")}
    used = {path: each["mask"].to(each["orig"].dtype) * each["orig"] for path, each in pruned.items()}
    return {name: value for name, value in state_dict.items() if name not in left_out} | used


def _without_suffix(names: list[str]) -> set[str]:
    return {name.removesuffix("_orig") for name in names}


def _batch_norms(module: LightningModule) -> Iterator[tuple[str, Any]]:
    """The layers of which BaseFinetuning freezes the statistics as well."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            yield name, layer


def _time_is_up(callback: Callback) -> bool:
    """Whether it is a Timer that has stopped the training, which decides anew: its time may be extended."""
    left = callback.time_remaining() if isinstance(callback, Timer) else None
    return left is not None and left <= 0


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
