"""Computes activations again in the backward pass, but adds a batch only once to running statistics."""

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

    torch runs them again for the backward pass, which would add the batch to running statistics a second time.
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
        # The layer must go on tracking: torch compares the tensors that both passes save for the backward pass.
        layer.momentum = 0.0
        layer.__dict__["num_batches_tracked"] = None
    try:
        yield
    finally:
        for layer, momentum in zip(tracking, momenta, strict=True):
            layer.momentum = momentum
            del layer.__dict__["num_batches_tracked"]
