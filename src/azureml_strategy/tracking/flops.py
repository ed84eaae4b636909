"""How many floating-point operations training takes: the numerator of MFU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


@runtime_checkable
class CountsFlops(Protocol):
    """A LightningModule that knows what training on a batch costs."""

    def training_flops(self, batch: Any) -> float:
        """Floating-point operations of a forward and backward pass of the whole model on a batch.

        What is computed a second time, to save memory, does not count, and neither do other ranks' batches.
        """


@runtime_checkable
class NamesInputs(Protocol):
    """A LightningModule whose forward pass on a batch can be tried: `self(self.pipeline_batch(batch)[0])`."""

    def pipeline_batch(self, batch: Any) -> tuple[Any, Any]:
        """What the forward pass takes, and what the loss is computed with."""


def flops_of(module: LightningModule) -> Callable[[Any], float] | None:
    """How to tell the operations of training on a batch; None where the module gives nothing to go by.

    By the module's own `training_flops`; else counted by torch, once for each shape of a sample. Call it before the
    strategy cuts the module: what counts is the whole model, whoever computes which part of it.

    Args:
        module: one that is a `CountsFlops` or a `NamesInputs`.
    """
    if isinstance(module, CountsFlops):
        return module.training_flops
    return _FlopCounter(module).count if isinstance(module, NamesInputs) else None


class _FlopCounter:
    """Counts matrix products, convolutions and attention, forward and backward, on a copy that holds no numbers.

    On the meta device nothing is computed, and neither the copy nor its activations need memory.
    """

    def __init__(self, module: LightningModule) -> None:
        self._model: Any = _on_meta(module)
        self._per_sample: dict[tuple[Any, ...], float] = {}

    def count(self, batch: Any) -> float:
        """Operations of training on a batch; 0 where they cannot be counted."""
        inputs = self._model.pipeline_batch(batch)[0]
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        sample = tuple(tensor.shape[1:] for tensor in tensors)
        if sample not in self._per_sample:
            self._per_sample[sample] = self._measure(inputs) / len(tensors[0])
        return self._per_sample[sample] * len(tensors[0])

    def _measure(self, inputs: Any) -> float:
        without_numbers = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
        try:
            return measure_flops(self._model, lambda: self._model(without_numbers), _sum)
        except Exception as error:  # whatever a forward pass of the user's does without numbers: training must go on
            rank_zero_warn(
                f"No MFU: the forward pass of {type(self._model).__name__} cannot be tried on tensors without numbers "
                f"({type(error).__name__}: {error}). Give it a training_flops(batch), the operations of a step."
            )
            return 0.0


def _sum(outputs: Any) -> Tensor:
    return torch.stack([leaf.sum() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]).sum()


def _on_meta(module: nn.Module) -> nn.Module:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): _without_numbers(tensor) for tensor in tensors})


def _without_numbers(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)
    return tensor.to("meta")
