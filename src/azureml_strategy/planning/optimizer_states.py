"""What an optimizer keeps for each parameter, from the first step of the real one on small parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.live_bytes import LiveBytes

# Sizes of the two trial parameters: what is not in proportion to them is counted for each tensor.
_SMALL, _LARGE = (32, 32), (128, 64)


@dataclass(frozen=True)
class OptimizerStates:
    """Bytes that an optimizer keeps and needs.

    Attributes:
        name: the optimizer's class.
        each: bytes kept for each number of a parameter.
        a_tensor: bytes kept for each parameter besides, such as a count of steps.
        workspace: bytes that a step needs for each number of the parameters that it computes together.
        together: whether a step computes all parameters at once (`foreach`), not one after the other.
    """

    name: str
    each: float
    a_tensor: float
    workspace: float
    together: bool

    def kept(self, elements: float, tensors: int) -> float:
        """Bytes kept for so many numbers in so many tensors."""
        return self.each * elements + self.a_tensor * tensors


def optimizer_states(
    make: Callable[[list[nn.Parameter]], Optimizer], dtype: torch.dtype = torch.float32, device: str = "cuda"
) -> OptimizerStates:
    """Take the real optimizer's first steps on small parameters, and count what it keeps.

    Args:
        make: returns the optimizer for parameters.
        dtype: of the parameters that it steps on.
        device: on `cuda`, torch's optimizers compute all parameters together unless they are fused or told otherwise
            (https://docs.pytorch.org/docs/stable/optim.html, "Algorithms"); a fused one needs no workspace.

    Raises:
        PlanError: the optimizer cannot step on two small matrices.
    """
    try:
        small, _, optimizer = _trial(make, _SMALL, dtype)
        large, workspace, optimizer = _trial(make, _LARGE, dtype)
    except (RuntimeError, ValueError, TypeError) as error:
        raise PlanError(
            f"The optimizer cannot take a step on two small matrices, so what it keeps is unknown: {error} Give "
            "an OptimizerStates of your own."
        ) from error
    numbers = [rows * columns for rows, columns in (_SMALL, _LARGE)]
    each = (large - small) / (numbers[1] - numbers[0])
    defaults = optimizer.defaults
    fused = bool(defaults.get("fused"))
    chosen = defaults.get("foreach")
    together = not fused and (device == "cuda" if chosen is None and "foreach" in defaults else bool(chosen))
    return OptimizerStates(
        type(optimizer).__name__, each, small - each * numbers[0], 0.0 if fused else workspace / numbers[1], together
    )


def _trial(
    make: Callable[[list[nn.Parameter]], Optimizer], shape: tuple[int, int], dtype: torch.dtype
) -> tuple[int, int, Optimizer]:
    """Return the bytes that are kept for a parameter, and the most that a later step needs besides."""
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    states = [each for each in tree_leaves(dict(optimizer.state)) if isinstance(each, Tensor)]
    with LiveBytes() as live:
        for tensor in (parameter, parameter.grad, *states):
            live.ignore(tensor)
        optimizer.step()
    return sum(each.nbytes for each in states), live.peak, optimizer
