"""Defines what a strategy asks of a module's chain of layers, and the chain that a module describes by its methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from azureml_strategy.strategies.pipeline.micro_batches import MicroBatch
from azureml_strategy.strategies.pipeline.partition import PipelineError, PipelineLayer, PipelineReady, chain_of


class Chain(Protocol):
    """The layers of a module, and how its steps and batches meet them."""

    @property
    def layers(self) -> Sequence[PipelineLayer]:
        """The layers, from the inputs to the outputs."""

    @property
    def heads(self) -> int:
        """How many of the last layers stay together, on the last stage; 1 if the chain may be cut anywhere."""

    @property
    def outside(self) -> str:
        """Where a parameter is that belongs to no layer, and what to do with it: ends the sentence of an error."""

    def view(self, index: int, layer: nn.Module) -> nn.Module:
        """Return what a stage runs of a layer: the layer itself, or another module with its parameters and names."""

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs of the first layer, and what all stages must read alike."""

    def computed(self, micro: MicroBatch, outputs: Any) -> AbstractContextManager[None]:
        """Give the module's step the outputs of the pipeline in place of what it would compute, once."""


class OwnChain:
    """The chain of a module that is `PipelineReady`. Its step takes the outputs from `forward`.

    Raises:
        PipelineError: the module does not say how to cut it, or two layers have the same name.
    """

    heads = 1
    outside = (
        "outside of its pipeline_layers(), where no stage would train or save it. Move it into a layer; a buffer that "
        "needs no saving may stay, with register_buffer(..., persistent=False) in __init__."
    )

    def __init__(self, module: LightningModule) -> None:
        self.layers = chain_of(module)
        self._module = module

    def view(self, index: int, layer: nn.Module) -> nn.Module:
        """Return the layer."""
        return layer

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return what `pipeline_batch` does.

        Raises:
            PipelineError: the inputs are neither a tensor nor a tuple of tensors.
        """
        inputs, targets = cast(PipelineReady, self._module).pipeline_batch(batch)
        if not isinstance(inputs, (Tensor, tuple, list)):
            raise PipelineError(
                f"pipeline_batch() gives the first layer a {type(inputs).__name__}, but between stages only a "
                "tensor or a tuple of tensors can be sent. Give one, and let the first layer take it apart."
            )
        return inputs, targets

    @contextmanager
    def computed(self, micro: MicroBatch, outputs: Any) -> Iterator[None]:
        """Let the module's `forward` give the outputs."""
        module, calls = self._module, 0
        step = f"{type(module).__name__}.{micro.hook}"

        def forward(*inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            given = inputs[0] if len(inputs) == 1 else inputs
            if calls > 1 or not _same(given, micro.inputs):
                raise PipelineError(
                    f"{step} calls self(...) "
                    + ("a second time" if calls > 1 else "with other inputs than pipeline_batch() gives")
                    + ", but in a pipeline the micro-batch has gone through the stages already, once, as "
                    "pipeline_batch() gave it. Change inputs in on_after_batch_transfer or in the first layer, and "
                    "call self(inputs) once."
                )
            return outputs

        module.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            del module.forward
        if not calls:
            raise PipelineError(
                f"{step} never calls self(inputs), so what the pipeline computed would go unused. Call it, instead of "
                "layers of the module: those of other stages are not in this process."
            )


def _same(given: Any, expected: Any) -> bool:
    """Whether two structures hold the same values. Tensors with the same memory and layout count as equal."""
    (leaves, structure), (expected_leaves, other) = tree_flatten(given), tree_flatten(expected)
    return structure == other and all(
        (each.data_ptr() == one.data_ptr() and each.shape == one.shape and each.stride() == one.stride())
        or torch.equal(each, one)
        for each, one in zip(leaves, expected_leaves, strict=True)
    )
