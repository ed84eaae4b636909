"""Names at the start of a training what is in evaluation mode although it trains.

`from_pretrained` of transformers leaves a model so, and Lightning keeps the modes that a module has: the model would
train without dropout and without activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from azureml_strategy.strategies.deepspeed_internals import is_of_zero
from azureml_strategy.strategies.mixed_precision import NORM_WITH_STATISTICS

# How many names a warning lists.
_SHOWN = 4


def warn_of_evaluation_modes(module: LightningModule) -> None:
    """Warn of parts in evaluation mode whose parameters an optimizer has. Nothing is changed: it may be meant."""
    found = list(trained_in_evaluation_mode(module))
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        rank_zero_warn(
            f"{', '.join(found[:_SHOWN])}{more} will train in evaluation mode, without dropout and without activation "
            "checkpointing. from_pretrained of transformers leaves a model so. Call its train() in configure_model, or "
            "load it by azureml_strategy.huggingface.load_pretrained; if it is meant, ignore this."
        )


def trained_in_evaluation_mode(module: LightningModule) -> Iterator[str]:
    """Yield the names of parts in evaluation mode with parameters that train, each without those inside of it.

    Frozen parts are not among them, nor models that no optimizer has, such as teachers, nor normalisations that keep
    their statistics.
    """
    own = {id(each) for each in module.parameters() if each.requires_grad}
    groups = (group for optimizer in module.trainer.optimizers for group in optimizer.param_groups)
    held = {id(each) for group in groups for each in group["params"]}
    # DeepSpeed's optimizers have others in the place of the parameters, and mark those that they train.
    trained = own & (held | {id(each) for each in module.parameters() if is_of_zero(each)}) or own
    inside: set[nn.Module] = set()
    for name, part in module.named_modules():
        if part in inside or part.training or isinstance(part, NORM_WITH_STATISTICS):
            continue
        inside |= set(part.modules())
        layers = (layer for layer in part.modules() if not isinstance(layer, NORM_WITH_STATISTICS))
        if any(id(parameter) in trained for layer in layers for parameter in layer.parameters(recurse=False)):
            yield name or type(module).__name__
