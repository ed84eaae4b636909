"""What a model of transformers takes by name."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def forward_arguments(model: PreTrainedModel) -> set[str]:
    """Return the names of what a model's forward takes, with those that it lists as its further keywords."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    # `**kwargs: Unpack[TransformersKwargs]`, a TypedDict: what packed samples need of flash attention, for example
    listed = [kind for each in parameters if each.kind is each.VAR_KEYWORD for kind in get_args(each.annotation)]
    return named.union(*(kind.__annotations__ for kind in listed))
