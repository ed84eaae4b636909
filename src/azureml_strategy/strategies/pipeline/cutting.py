"""Finds a LightningModule's chain of layers, by its methods or in its transformers model, and cuts it into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import nn
from typing_extensions import override

from azureml_strategy.huggingface.pipeline import ModelChain
from azureml_strategy.huggingface.transformers_internals import find_models
from azureml_strategy.strategies.mixed_precision import float32_buffers
from azureml_strategy.strategies.pipeline.chain import Chain, OwnChain
from azureml_strategy.strategies.pipeline.micro_batches import MicroBatch
from azureml_strategy.strategies.pipeline.partition import PipelineError, PipelineReady, place_of, stage_bounds
from azureml_strategy.strategies.pipeline.stage import StageLayer


class OtherStage(nn.Module):
    """Placeholder in a LightningModule for a layer of another stage, with the number of its trainable parameters."""

    def __init__(self, name: str, trainable: int) -> None:
        super().__init__()
        self.name, self.trainable = name, trainable

    @override
    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError(
            f"Layer {self.name} is on another stage of the pipeline. Within training_step, validation_step and "
            "test_step call self(inputs); elsewhere a pipeline cannot run the whole module: use its consolidated "
            "weights in one process."
        )


class Cut:
    """Decides where a module is cut, and reduces the module to one stage.

    The module holds the layers of its chain: real ones, or sketches on the meta device, which take no memory.

    Attributes:
        bounds: stage i has the layers from the i-th number up to, not including, the next one.
        places: where the module holds each layer, as a dotted name; None for functions.
        parameters: trainable parameters of each layer.

    Raises:
        PipelineError: the module has parameters or state outside of the chain, layers share a parameter untied, or the
            chain cannot be cut so.
    """

    def __init__(self, module: LightningModule, chain: Chain, num_stages: int, partition: str) -> None:
        self._module, self._chain = module, chain
        self._layers = chain.layers
        self.places = [place_of(module, index, layer) for index, layer in enumerate(self._layers)]
        sketches = (name for name, buffer in module.named_buffers() if buffer.is_meta)
        self._refuse_outside([*dict(module.named_parameters()), *module.state_dict(), *sketches])
        self.parameters = [self._count(index) for index in range(len(self._layers))]
        # The last layers count as one, as they stay together.
        first, kinds = len(self._layers) - chain.heads, [layer.kind for layer in self._layers]
        together = [*self.parameters[:first], sum(self.parameters[first:])]
        starts = stage_bounds(together, kinds[: first + 1], num_stages, partition)[:-1]
        self.bounds = [*starts, len(self._layers)]
        self._refuse_shared()
        self._shared: dict[str, nn.Parameter] = {}
        self._kept: dict[int, nn.Module] = {}

    def stage_of(self, index: int) -> int:
        """Return the stage that has a layer."""
        return next(stage for stage, stop in enumerate(self.bounds[1:]) if index < stop)

    def stage_layers(self) -> list[StageLayer]:
        """Return the chain for DeepSpeed, which builds its stage's layers alone and ties parameters between stages."""
        return [
            StageLayer(self._builder(index), layer.tied if self._ties_stages(index) else None, layer.tied_parameter)
            for index, layer in enumerate(self._layers)
        ]

    def has_float32_buffers(self) -> bool:
        """Whether a layer that each stage builds for itself, in no place of the module, has such buffers."""
        with torch.device("meta"):
            built = [
                as_module(layer.build()) for layer, place in zip(self._layers, self.places, strict=True) if not place
            ]
        return any(map(float32_buffers, built))

    def stages_of_copies(self) -> list[int]:
        """Return the stages whose only trainable parameters are tied to those of earlier stages."""
        if any(isinstance(each, OtherStage) for each in self._module.modules()):
            return []  # it was cut before, when these stages were refused
        untied, keys = [0] * (len(self.bounds) - 1), set[str | None]()
        for index, (layer, place) in enumerate(zip(self._layers, self.places, strict=True)):
            untied[self.stage_of(index)] += self.parameters[index]
            if place and layer.tied is not None and layer.tied in keys:
                copy = self._module.get_submodule(place).get_parameter(layer.tied_parameter)
                untied[self.stage_of(index)] -= copy.numel()
            keys.add(layer.tied)
        whole = [sum(self.parameters[start:stop]) for start, stop in pairwise(self.bounds)]
        counts = enumerate(zip(whole, untied, strict=True))
        return [stage for stage, (of_stage, of_it_untied) in counts if of_stage and not of_it_untied]

    def drop_others(self, stage: int) -> None:
        """Put placeholders in the module in place of the layers of all stages but this."""
        for index, place in enumerate(self.places):
            if place is not None and self.stage_of(index) != stage:
                self._module.set_submodule(place, OtherStage(place, self.parameters[index]))

    def keep_built(self) -> None:
        """Put the layers that were built into the module in place of their sketches."""
        for index, layer in self._kept.items():
            place = self.places[index]
            if place is not None:
                self._module.set_submodule(place, layer)

    def built(self) -> list[nn.Module]:
        """Return the layers of this stage, once it has built them, as the module has them."""
        return list(self._kept.values())

    def check_nothing_added(self) -> None:
        """Refuse parameters that were made after the module was cut."""
        self._refuse_outside(name for name, each in self._module.named_parameters() if each.requires_grad)

    def sizes(self) -> list[tuple[int, int, int]]:
        """Return the first layer, the last layer and the trainable parameters of each stage."""
        return [(start, stop - 1, sum(self.parameters[start:stop])) for start, stop in pairwise(self.bounds)]

    def summary(self, replicas: int) -> str:
        """Describe the stages in one line."""
        words = [f"layers {first} to {last}: {parameters:,}" for first, last, parameters in self.sizes()]
        return f"Pipeline of {len(words)} stages x {replicas} replicas; parameters by stage: {'; '.join(words)}"

    def _ties_stages(self, index: int) -> bool:
        """Whether a layer shares its parameter with other stages and is the first of its stage to do so."""
        key = self._layers[index].tied
        tied = [each for each, layer in enumerate(self._layers) if key is not None and layer.tied == key]
        stage = self.stage_of(index)
        here = [each for each in tied if self.stage_of(each) == stage]
        return len(here) < len(tied) and here[0] == index

    def _builder(self, index: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            layer, module = self._layers[index], self._existing(index)
            if module is None:
                module = as_module(layer.build())
            if layer.tied is not None:  # by the first layer in this stage with the same key
                parameter = self._shared.setdefault(layer.tied, module.get_parameter(layer.tied_parameter))
                owner, _, name = layer.tied_parameter.rpartition(".")
                setattr(module.get_submodule(owner), name, parameter)
            self._kept[index] = module
            return self._chain.view(index, module)

        return build

    def _existing(self, index: int) -> nn.Module | None:
        """Return the module's own layer; None if there is none, or only a sketch on the meta device."""
        place = self.places[index]
        layer = self._module.get_submodule(place) if place is not None else None
        if isinstance(layer, OtherStage):
            raise PipelineError(
                f"This module was cut before, into other stages, and {place} is no longer in this process. Make a new "
                "module, and give it the consolidated weights of the old one."
            )
        if layer is None or any(each.is_meta for each in (*layer.parameters(), *layer.buffers())):
            return None
        return layer

    def _count(self, index: int) -> int:
        """Return the number of trainable parameters of a layer."""
        place = self.places[index]
        if place is not None:
            held = self._module.get_submodule(place)
            if isinstance(held, OtherStage):
                return held.trainable
            return sum(parameter.numel() for parameter in held.parameters() if parameter.requires_grad)
        with torch.device("meta"):
            layer = as_module(self._layers[index].build())
        if any(True for _ in layer.parameters()):
            name = self._layers[index].name
            raise PipelineError(
                f"The pipeline layer {name!r} has parameters, but {type(self._module).__name__} holds no submodule of "
                f"that name. Name it after the attribute it is kept under, as `network.{name}`."
            )
        return 0

    def _refuse_shared(self) -> None:
        """Refuse parameters of several layers that would become a copy for each layer."""
        first: dict[int, tuple[int, str, str | None]] = {}
        for index, (layer, place) in enumerate(zip(self._layers, self.places, strict=True)):
            for name, each in self._module.get_submodule(place).named_parameters() if place else ():
                key = layer.tied if name == layer.tied_parameter else None
                other, other_name, other_key = first.setdefault(id(each), (index, f"{place}.{name}", key))
                apart = each.is_meta or self.stage_of(other) != self.stage_of(index)
                if other != index and apart and (key is None or key != other_key):
                    raise PipelineError(
                        f"{other_name} is also {place}.{name}, but two stages would each train a copy of it. Tie one "
                        "parameter of each layer by the same `tied` key and its name as `tied_parameter`, give each "
                        "layer parameters of its own, or have one layer of the chain call both."
                    )

    def _refuse_outside(self, names: Iterable[str]) -> None:
        inside = tuple(f"{place}." for place in self.places if place is not None)
        outside = sorted({name for name in names if not name.startswith(inside)})
        if outside:
            raise PipelineError(f"{type(self._module).__name__} has {', '.join(outside)} {self._chain.outside}")


def as_module(layer: Callable[..., Any]) -> nn.Module:
    """Return a layer as a module; a function becomes a module without parameters."""
    return layer if isinstance(layer, nn.Module) else _Function(layer)


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    @override
    def forward(self, inputs: Any) -> Any:
        return self._function(inputs)


def find_chain(module: LightningModule, activation_checkpointing: bool) -> Chain:
    """Return the chain of a module that has its own, or holds one transformers model. It may have been cut before.

    Raises:
        ConfigurationError: there is no chain, or the model cannot be cut.
    """
    if isinstance(module, PipelineReady) or not find_models(module):
        return OwnChain(module)
    return HuggingFaceChain(module, activation_checkpointing)


class HuggingFaceChain:
    """The chain of a module that holds a transformers model. Its step calls that model.

    The module may have a `pipeline_batch` that returns the model's inputs by name, and the targets.

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
        """Return a module that runs the layer by the model's forward."""
        return self._model.view(index, layer)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return the model's inputs, and everything that the stages must read alike."""
        inputs, targets = self._by_name(batch)
        return self._model.pack(inputs), targets

    def computed(self, micro: MicroBatch, outputs: Any) -> AbstractContextManager[None]:
        """Let the model's base give the outputs."""
        return self._model.computed(micro.hook, outputs, self._by_name(micro.batch)[0])

    def _by_name(self, batch: Any) -> tuple[Mapping[str, Any], Any]:
        inputs, targets = getattr(self._module, "pipeline_batch", self._model.split)(batch)
        return inputs, targets
