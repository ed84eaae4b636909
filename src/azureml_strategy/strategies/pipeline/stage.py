"""The layers of one stage, as DeepSpeed's PipelineModule."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Self

import torch
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.utils._pytree import tree_map
from typing_extensions import override

from azureml_strategy.strategies.activation_checkpointing import checkpointed


@dataclass(frozen=True)
class StageLayer:
    """A layer, with what DeepSpeed needs to know about it.

    Attributes:
        build: makes the layer, or takes it from the LightningModule that has it.
        tied: key of the parameter that the layer shares with layers of other stages.
        tied_parameter: name of that parameter in the layer.
    """

    build: Callable[[], nn.Module]
    tied: str | None
    tied_parameter: str


def _spec(layer: StageLayer) -> LayerSpec:
    """Return DeepSpeed's description of a layer, which makes it by the layer's own `build`."""
    spec = LayerSpec(nn.Module)
    if layer.tied is not None:
        spec = TiedLayerSpec(layer.tied, nn.Module, tied_weight_attr=layer.tied_parameter)
    spec.build = lambda log=False: layer.build()
    return spec


class StageModule(PipelineModule):  # type: ignore[misc] # DeepSpeed has no annotations
    """The layers of this rank's stage.

    Consecutive ranks are replicas of the same stage, which is DeepSpeed's order. Such ranks share a node and exchange
    gradients, which are larger than the activations between stages in all but very small models.

    Args:
        layers: the whole chain.
        bounds: where it is cut, `num_stages + 1` numbers.
        checkpointed_layers: keep the activations at every n-th layer, and recompute the others; 0 keeps all.
    """

    def __init__(self, layers: Sequence[StageLayer], bounds: Sequence[int], checkpointed_layers: int) -> None:
        self._bounds = list(bounds)
        self._alone: list[nn.Module] = []
        with redirect_stdout(io.StringIO()):  # rank 0 would print every layer
            super().__init__(
                list(map(_spec, layers)),
                num_stages=len(bounds) - 1,
                activation_checkpoint_interval=checkpointed_layers,
            )
        self.activation_checkpoint_func = checkpointed(self)
        # Mark the parameters that count towards the gradient norm: each once, tied ones on their first stage. By
        # default, DeepSpeed counts all parameters of a tied layer on its first stage only. In float32, it also leaves
        # out all parameters of later stages that have no `model_parallel` mark.
        tied_before = [comm for comm in self.tied_comms.values() if self.global_rank != min(comm["ranks"])]
        copies = {id(comm["module"].get_parameter(name)) for comm in tied_before for name in comm["weight_attr"]}
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = id(parameter) in copies
            parameter.model_parallel = id(parameter) not in copies
        for parameter in self.parameters():
            parameter.data = parameter.data.contiguous()  # DeepSpeed sends raw bytes and ignores channels_last

    @property
    def layers(self) -> dict[int, nn.Module]:
        """This stage's layers by their index in the chain."""
        return dict(enumerate(self.forward_funcs, self._local_start))

    @override
    def forward(self, forward_input: Any) -> Any:
        # DeepSpeed sends the raw memory to the next stage, and the receiver assumes that it is contiguous.
        outputs = tree_map(torch.Tensor.contiguous, super().forward(forward_input))
        sends_on = torch.is_grad_enabled() and self.stage_id < self.num_stages - 1
        return tree_map(_taking_gradients, outputs) if sends_on else outputs

    @override
    def train(self, mode: bool = True) -> Self:
        # The engine calls this before each batch. Lightning sets the layers that the LightningModule holds, and keeps
        # frozen ones in evaluation mode.
        self.training = mode
        for layer in self._alone:
            layer.train(mode)
        return self

    def set_modes_but_of(self, module: nn.Module) -> None:
        """From now on, `train` reaches the layers of which the module holds no part. By default it reaches none."""
        held = set(module.modules())
        self._alone = [layer for layer in self.layers.values() if held.isdisjoint(layer.modules())]

    @override
    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = self._bounds
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


def _taking_gradients(output: torch.Tensor) -> torch.Tensor:
    """Return a float output that takes the gradient that the next stage sends, even if it depends on no parameter.

    It depends on none where all parameters are frozen for now, or where a layer passes on what it was given.
    """
    if output.requires_grad or not output.is_floating_point():
        return output
    return output.detach().requires_grad_()
