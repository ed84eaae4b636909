"""Defines what a module needs to be cut into stages, and decides where it is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule
from torch import nn

from azureml_strategy.strategies.errors import ConfigurationError

_BY_KIND = "type:"


class PipelineError(ConfigurationError):
    """A module, a batch, a Trainer or a checkpoint does not fit the pipeline. The message says what to change."""


def check_method(partition: str) -> None:
    """Refuse an unknown way of cutting."""
    by_kind = partition.startswith(_BY_KIND) and partition != _BY_KIND
    if partition not in ("parameters", "uniform") and not by_kind:
        raise PipelineError(
            f"partition={partition!r} is unknown. Choose 'parameters' (equal sums of parameters), 'uniform' (equal "
            "numbers of layers) or 'type:KIND' (equal numbers of layers of a kind, as 'type:block')."
        )


def stage_bounds(parameters: Sequence[int], kinds: Sequence[str], num_stages: int, partition: str) -> list[int]:
    """Decide where the chain is cut.

    Args:
        parameters: number of trainable parameters of each layer.
        kinds: kind of each layer.
        num_stages: number of stages.
        partition: `parameters`, `uniform` or `type:KIND`.

    Returns:
        `num_stages + 1` numbers: stage i has the layers from the i-th up to, not including, the next one.

    Raises:
        PipelineError: more stages than layers, no layer of that kind, or a stage without parameters.
    """
    if num_stages > len(parameters):
        raise PipelineError(
            f"num_stages={num_stages}, but the chain has {len(parameters)} layers, and each stage needs one. Choose "
            f"num_stages={len(parameters)} or less."
        )
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    if partition == "uniform":
        cut = partition_uniform(len(parameters), num_stages)
    elif partition == "parameters":
        cut = partition_balanced(list(parameters), num_stages)
    else:
        kind = partition.removeprefix(_BY_KIND)
        if kind not in kinds:
            raise PipelineError(
                f"partition={partition!r}, but the kinds of layers are {', '.join(sorted(set(kinds)))}."
            )
        cut = partition_balanced([int(each == kind) for each in kinds], num_stages)
    bounds = list(map(int, cut))
    held = [sum(parameters[start:stop]) for start, stop in pairwise(bounds)]
    if 0 in held:
        raise PipelineError(
            f"partition={partition!r} cuts {len(parameters)} layers at {bounds}, and stage {held.index(0)} would have "
            f"no trainable parameter (parameters of the layers: {list(parameters)}). Choose fewer stages than "
            f"{num_stages}, or another partition."
        )
    return bounds


class PipelineLayer(Protocol):
    """One layer of a chain. It takes what the previous layer returns, a tensor or a tuple of tensors."""

    @property
    def build(self) -> Callable[[], Callable[..., Any]]:
        """Makes the layer, an `nn.Module` or a function. Its parameters are equal in every process that makes it."""

    @property
    def name(self) -> str:
        """The name of this layer's submodule in the LightningModule, such as `network.conv1`.

        Each name is unique. A module that keeps its whole chain, in order, in an `nn.ModuleList` called `layers` may
        use any names.
        """

    @property
    def kind(self) -> str:
        """The kind of the layer; `partition="type:KIND"` counts the layers of one kind."""

    @property
    def tied(self) -> str | None:
        """Key of a shared parameter. Layers with the same key share it; None for a layer that shares nothing."""

    @property
    def tied_parameter(self) -> str:
        """The name of the shared parameter in this layer, such as `weight`; not read if `tied` is None."""


@runtime_checkable
class PipelineReady(Protocol):
    """A LightningModule that can be cut into stages, and that trains unchanged under other strategies.

    Its `training_step` calls `self(inputs)` once, with the inputs that `pipeline_batch` gives. On the last stage, that
    call returns the output of the pipeline. The other stages do not run the step.
    """

    def pipeline_layers(self) -> Sequence[PipelineLayer]:
        """Return the forward pass as a chain of layers. Every parameter of the module belongs to one of them."""

    def pipeline_batch(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs of the first layer, a tensor or a tuple of tensors, and the targets of the loss."""


def chain_of(module: LightningModule) -> list[PipelineLayer]:
    """Return the layers of a module.

    Raises:
        PipelineError: the module does not say how to cut it, or two layers have the same name.
    """
    if not isinstance(module, PipelineReady):
        raise PipelineError(
            f"{type(module).__name__} cannot be cut into stages: it has no pipeline_layers() or no pipeline_batch(). "
            "Add both, as the page `Pipeline parallelism` shows, or use strategy='azureml_ddp'."
        )
    layers = list(module.pipeline_layers())
    names = [layer.name for layer in layers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PipelineError(f"{type(module).__name__} has several layers called {', '.join(twice)}. Give each its own.")
    return layers


def place_of(module: nn.Module, index: int, layer: PipelineLayer) -> str | None:
    """Return the dotted name under which a module holds a layer; None for a function, which it does not hold."""
    names = (layer.name, f"layers.{index}")
    return next((name for name in names if _holds(module, name)), None)


def _holds(module: nn.Module, name: str) -> bool:
    for part in name.split("."):
        child = getattr(module, part, None)  # named_children would leave out a second name of a layer
        if not isinstance(child, nn.Module):
            return False
        module = child
    return True
