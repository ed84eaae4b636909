"""Every name of transformers that we use and that it may move: its model class, plans, loader and switches, once.

The rest of the package asks here. `tests/test_internals.py` checks each name on the oldest and the newest transformers
that pyproject.toml allows. Nothing here imports transformers by itself: a module can only hold one of its models after
the user's code has imported it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_pretrained_model(module: object) -> TypeGuard[PreTrainedModel]:
    """Whether a module is a model of transformers."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def find_models(module: nn.Module) -> dict[str, PreTrainedModel]:
    """Return the models of transformers in a module by their names in it, without those inside another model.

    A model that `peft` has wrapped is found below the wrapper.
    """
    found: dict[str, PreTrainedModel] = {}
    for name, each in module.named_modules():
        inside = any(name.startswith(f"{outer}.") or outer == "" for outer in found)
        if is_pretrained_model(each) and not inside:
            found[name] = each
    return found
