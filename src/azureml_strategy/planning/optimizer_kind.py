"""Which optimizer a module trains with, asked of the module itself, without weights and without a Trainer."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch.optim import SGD, Adam, Adamax, NAdam, Optimizer, RAdam
from torch.utils._pytree import tree_leaves

from azureml_strategy.models import FineTuner, ImageClassifier, LanguageModel

# Both keep two states for each parameter, or one with momentum: what they read and write is in fitted.toml.
_LIKE_ADAM = (Adam, Adamax, NAdam, RAdam)  # AdamW is an Adam
# Their schedules ask a Trainer for the number of steps.
_OURS = {
    ImageClassifier.configure_optimizers: "sgd",
    LanguageModel.configure_optimizers: "adam",
    FineTuner.configure_optimizers: "adam",
}


def optimizer_kind(module: LightningModule) -> tuple[str, str]:
    """Return `sgd` or `adam`, and a sentence on what was assumed; an empty one if the module says it.

    Args:
        module: on the meta device.
    """
    name = type(module).__name__
    ours = _OURS.get(type(module).configure_optimizers)
    if ours is not None:
        return ours, ""
    try:
        with torch.device("meta"):
            made = [each for each in tree_leaves(module.configure_optimizers()) if isinstance(each, Optimizer)]
    except Exception as error:  # what a user's module does here is its own
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return "adam", f"The optimizer was taken for Adam: {name}.configure_optimizers needs a Trainer ({text})."
    if made and all(isinstance(each, SGD) for each in made):
        return "sgd", ""
    if made and all(isinstance(each, _LIKE_ADAM) for each in made):
        return "adam", ""
    kinds = " and ".join(sorted({type(each).__name__ for each in made})) or "none"
    return "adam", f"The optimizer of {name} ({kinds}) was taken for Adam."
