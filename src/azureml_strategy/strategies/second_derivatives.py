"""Refuses derivatives of derivatives through layers that tensor parallelism has cut.

Neither DTensor's collectives nor those of DeepSpeed's AutoTP record what their backward passes do. So a penalty on
`torch.autograd.grad(outputs, inputs, create_graph=True)` would be trained by a part of its gradient, without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from azureml_strategy.strategies.errors import ConfigurationError


def refuse_second_derivatives(layer: nn.Module) -> None:
    """Raise ConfigurationError in each backward pass with `create_graph=True` through a layer that communicates."""
    layer.register_forward_hook(_watch_backward)


def _watch_backward(layer: nn.Module, inputs: Any, output: Any) -> None:
    # A compiled layer cannot have such a hook; torch itself refuses second derivatives of one.
    if isinstance(output, Tensor) and output.requires_grad and not torch.compiler.is_compiling():
        output.register_hook(_refuse_recorded)  # type: ignore[no-untyped-call]


def _refuse_recorded(gradient: Tensor) -> None:
    if torch.is_grad_enabled():  # which a backward pass has only with create_graph=True
        raise ConfigurationError(
            "create_graph=True asks for derivatives of gradients, as gradient penalties do, but the layers that tensor "
            "parallelism has cut cannot give them: the penalty would be trained by a part of its gradient. Use "
            "strategy='azureml_ddp', or leave the penalty out."
        )
