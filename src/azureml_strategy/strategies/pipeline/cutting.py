"""Cuts a LightningModule's chain into stages, and reduces the module to the stage of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import nn
from typing_extensions import override

from azureml_strategy.strategies.pipeline.partition import (
    PipelineError,
    PipelineLayer,
    chain_of,
    place_of,
    stage_bounds,
)
from azureml_strategy.strategies.pipeline.stage import StageLayer


class OtherStage(nn.Module):
    """Placeholder in a LightningModule for a layer of another stage.

    Args:
        name: name of the layer.
        parameters: number of its trainable parameters.
    """

    def __init__(self, name: str, parameters: int) -> None:
        super().__init__()
        self.name = name
        self.trainable = parameters

    @override
    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to run.

        Raises:
            PipelineError: always.
        """
        raise PipelineError(
            f"Layer {self.name} is on another stage of the pipeline. Within training_step, validation_step and "
            "test_step call self(inputs); elsewhere a pipeline cannot run the whole module: use its consolidated "
            "weights in one process."
        )


class Cut:
    """Decides where a module is cut, and reduces the module to one stage.

    Args:
        module: holds its layers: real ones, or ones on the meta device, which take no memory.
        num_stages: number of stages.
        partition: see `stage_bounds`.

    Attributes:
        bounds: stage i has the layers from the i-th number up to, not including, the next one.
        places: where the module holds each layer, as a dotted name; None for functions.
        parameters: trainable parameters of each layer.

    Raises:
        PipelineError: the module has no chain, has parameters or state outside of it, or the chain cannot be cut so.
    """

    def __init__(self, module: LightningModule, num_stages: int, partition: str) -> None:
        self._module = module
        self._chain = chain_of(module)
        self.places = [place_of(module, index, layer) for index, layer in enumerate(self._chain)]
        self._check_nothing_outside()
        self.parameters = [self._count(index) for index in range(len(self._chain))]
        self.bounds = stage_bounds(self.parameters, [layer.kind for layer in self._chain], num_stages, partition)
        self._shared: dict[str, nn.Parameter] = {}

    def stage_of(self, index: int) -> int:
        """Return the stage that has a layer."""
        return next(stage for stage, stop in enumerate(self.bounds[1:]) if index < stop)

    def stage_layers(self) -> list[StageLayer]:
        """Return the chain for DeepSpeed, which makes only its stage's layers and shares parameters between stages."""
        return [
            StageLayer(self._builder(index), layer.tied if self._ties_stages(index) else None, layer.tied_parameter)
            for index, layer in enumerate(self._chain)
        ]

    def apply(self, layers: Mapping[int, nn.Module]) -> None:
        """Keep only this stage's layers in the module, and put placeholders in the place of the others.

        Args:
            layers: this stage's layers, by their index in the chain.
        """
        for index, place in enumerate(self.places):
            if place is not None:
                other = OtherStage(place, self.parameters[index])
                self._module.set_submodule(place, layers.get(index, other))

    def summary(self, replicas: int) -> str:
        """Describe the stages in one line."""
        stages = pairwise(self.bounds)
        words = [f"layers {start} to {stop - 1}: {sum(self.parameters[start:stop]):,}" for start, stop in stages]
        return f"Pipeline of {len(words)} stages x {replicas} replicas; parameters by stage: {'; '.join(words)}"

    def _ties_stages(self, index: int) -> bool:
        """Whether a layer shares its parameter with other stages and is the first of its own stage to do so."""
        key = self._chain[index].tied
        tied = [each for each, layer in enumerate(self._chain) if key is not None and layer.tied == key]
        stage = self.stage_of(index)
        mine = [each for each in tied if self.stage_of(each) == stage]
        return len(mine) < len(tied) and mine[0] == index

    def _builder(self, index: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            layer, module = self._chain[index], self._existing(index)
            if module is None:
                module = as_module(layer.build())
            if layer.tied is not None:
                _share(module, layer, self._shared)
            return module

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
        return None if layer is None or _is_sketch(layer) else layer

    def _count(self, index: int) -> int:
        place = self.places[index]
        if place is not None:
            return _trainable(self._module.get_submodule(place))
        with torch.device("meta"):
            layer = as_module(self._chain[index].build())
        if any(True for _ in layer.parameters()):
            name = self._chain[index].name
            raise PipelineError(
                f"The pipeline layer {name!r} has parameters, but {type(self._module).__name__} holds no submodule of "
                f"that name. Name it after the attribute it is kept under, as `network.{name}`."
            )
        return 0

    def _check_nothing_outside(self) -> None:
        inside = tuple(f"{place}." for place in self.places if place is not None)
        sketches = (name for name, buffer in self._module.named_buffers() if buffer.is_meta)
        kept = [*dict(self._module.named_parameters()), *self._module.state_dict(), *sketches]
        outside = sorted({name for name in kept if not name.startswith(inside)})
        if outside:
            raise PipelineError(
                f"{type(self._module).__name__} has {', '.join(outside)} outside of its pipeline_layers(), where no "
                "stage would train or save it. Move it into a layer; a buffer that needs no saving may stay, with "
                "register_buffer(..., persistent=False) in __init__."
            )


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


def _is_sketch(layer: nn.Module) -> bool:
    return any(tensor.is_meta for tensors in (layer.parameters(), layer.buffers()) for tensor in tensors)


def _trainable(layer: nn.Module) -> int:
    if isinstance(layer, OtherStage):
        return layer.trainable
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)


def _share(module: nn.Module, layer: PipelineLayer, shared: dict[str, nn.Parameter]) -> None:
    """Give a layer the shared parameter of the first layer in this stage with the same tie key."""
    assert layer.tied is not None
    parameter = shared.setdefault(layer.tied, module.get_parameter(layer.tied_parameter))
    owner, _, name = layer.tied_parameter.rpartition(".")
    setattr(module.get_submodule(owner), name, parameter)
