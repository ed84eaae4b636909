"""Finds how a module is cut: by its own methods, or as the transformers model that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from azureml_strategy.huggingface.pipeline import ModelChain
from azureml_strategy.huggingface.transformers_internals import find_models
from azureml_strategy.strategies.pipeline.chain import Chain, OwnChain
from azureml_strategy.strategies.pipeline.cutting import OtherStage
from azureml_strategy.strategies.pipeline.micro_batches import MicroBatch
from azureml_strategy.strategies.pipeline.partition import PipelineReady


def find_chain(module: LightningModule, activation_checkpointing: bool) -> Chain:
    """Return the chain of a module that still has all its layers, or was cut before.

    Args:
        module: has `pipeline_layers` and `pipeline_batch`, or holds one transformers model.
        activation_checkpointing: whether the strategy recomputes activations.

    Raises:
        ConfigurationError: there is none, or a model that cannot be cut.
    """
    if isinstance(module, PipelineReady) or not find_models(module):
        return OwnChain(module)
    return HuggingFaceChain(module, activation_checkpointing)


class HuggingFaceChain:
    """The chain of a module that holds a transformers model. Its step calls that model.

    Args:
        module: may have a `pipeline_batch` that returns the model's inputs by name, and the targets.
        activation_checkpointing: whether the strategy recomputes activations.

    Raises:
        UnfitModelError: the model cannot be cut.
    """

    outside = (
        "outside of its transformers model and of other submodules, where no stage would train or save it. Move it "
        "into a submodule; a buffer that needs no saving may stay, with register_buffer(..., persistent=False)."
    )

    def __init__(self, module: LightningModule, activation_checkpointing: bool) -> None:
        self._module = module

        def has_weights(layer: nn.Module) -> bool:
            return isinstance(layer, OtherStage) or bool(layer.state_dict())

        self._model = ModelChain(module, has_weights, activation_checkpointing)
        self.layers, self.heads = self._model.layers, self._model.heads
        if not any(isinstance(each, OtherStage) for each in module.modules()):
            self._model.check()

    def view(self, index: int, layer: nn.Module) -> nn.Module:
        """Return a module that runs the layer by the model's own forward."""
        return self._model.view(index, layer)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return the model's inputs, and everything that the stages must read alike."""
        inputs, targets = self._by_name(batch)
        return self._model.pack(inputs), targets

    def computed(self, micro: MicroBatch, outputs: Any) -> AbstractContextManager[None]:
        """Let the model's base give the outputs."""
        return self._model.computed(micro.hook, outputs, self._by_name(micro.batch)[0])

    def _by_name(self, batch: Any) -> tuple[Mapping[str, Any], Any]:
        own = getattr(self._module, "pipeline_batch", self._model.split)
        inputs, targets = own(batch)
        return inputs, targets
