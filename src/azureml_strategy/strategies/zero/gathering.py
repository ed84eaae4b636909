"""Gathers the parameters of a compiled part as one under ZeRO-3, as there is no place for hooks inside of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def gather_as_one(engine: DeepSpeedEngine, parts: Iterable[nn.Module]) -> Callable[[], None]:
    """Let ZeRO-3 gather all parameters of a part when the part is called, and free them when it returns.

    DeepSpeed gathers layer by layer by hooks, and a graph would end at each. It can take a part for one layer, a leaf.
    Marked before there is an engine, a leaf has its gradients reduced by a hook on its inputs, which comes before them
    if no input needs a gradient: zeros would be trained. Marked after, gradients are reduced one by one, as ever.

    Args:
        engine: of stage 3, which has had no forward pass.
        parts: of its module.

    Returns:
        A function that takes the marks off the parts, after the engine's end.
    """
    from deepspeed.utils import set_z3_leaf_module

    parts = list(parts)
    inside = {
        id(hooks)
        for part in parts
        for each in part.modules()
        if each is not part
        for hooks in (each._forward_pre_hooks, each._forward_hooks)
    }
    offload: Any = engine.optimizer.parameter_offload
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        if id(handle.hooks_dict_ref()) in inside:
            handle.remove()
    for part in parts:
        set_z3_leaf_module(part, True)
    return partial(_unmark, parts)


def _unmark(parts: Iterable[nn.Module]) -> None:
    from deepspeed.utils import set_z3_leaf_module

    for part in parts:
        set_z3_leaf_module(part, False)
