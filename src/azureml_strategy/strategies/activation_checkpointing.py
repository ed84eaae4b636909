"""Computes activations again in the backward pass, and counts a batch once in the running statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from azureml_strategy.strategies.mixed_precision import NORM_WITH_STATISTICS


def checkpointed(module: nn.Module) -> Callable[..., Any]:
    """Return `torch.utils.checkpoint.checkpoint` for functions that run layers of a module.

    The second forward pass, which torch makes for the backward pass, would add the batch to running statistics again.

    Args:
        module: has the layers.

    Returns:
        A function of another one and its arguments.
    """
    if not any(isinstance(layer, NORM_WITH_STATISTICS) for layer in module.modules()):
        return partial(checkpoint, use_reentrant=False)  # torch.compile takes no contexts

    return partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), _without_statistics(module)))


@contextmanager
def _without_statistics(module: nn.Module) -> Iterator[None]:
    tracking = [
        layer
        for layer in module.modules()
        if isinstance(layer, NORM_WITH_STATISTICS) and layer.training and layer.track_running_stats
    ]
    momenta = [layer.momentum for layer in tracking]
    for layer in tracking:
        # Without statistics it would save less for the backward pass, and torch compares what the two passes save.
        layer.momentum = 0.0
        layer.__dict__["num_batches_tracked"] = None
    try:
        yield
    finally:
        for layer, momentum in zip(tracking, momenta, strict=True):
            layer.momentum = momentum
            del layer.__dict__["num_batches_tracked"]
