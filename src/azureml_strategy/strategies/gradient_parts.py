"""The part of each gradient that a rank holds, under every strategy, and the norm of all gradients.

DDP has whole gradients in `parameter.grad`. FSDP2 and tensor parallelism have parts there, which DTensors describe.
DeepSpeed moves gradients into buffers of its own and leaves None there: ZeRO 1 and 2 keep a slice of the row of all
parameters, ZeRO 3 a slice of each parameter, and its bfloat16 pipeline a whole float32 copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from azureml_strategy.strategies.deepspeed_internals import FlatSlice, float32_copy, has_gradients, is_of_zero
from azureml_strategy.strategies.errors import ConfigurationError


class Gradient:
    """A gradient that is whole on this rank.

    Args:
        name: of the parameter.
        parameter: it has a gradient.

    Attributes:
        counts: whether it counts in the norm of all gradients; False for further copies of a shared parameter.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.counts = not getattr(parameter, "ds_pipe_replicated", False)

    @property
    def parts(self) -> int:
        """How many different parts the ranks that train the parameter together hold of the gradient."""
        return 1

    @property
    def scale(self) -> float:
        """The factor that the gradient is stored with: DeepSpeed's loss scale in float16."""
        return 1.0

    def part(self) -> Tensor | None:
        """Return this rank's part as it is stored; None if it has none. To change it, call `set_part`."""
        return self.parameter.grad

    def set_part(self, part: Tensor) -> None:
        """Replace this rank's part."""
        assert self.parameter.grad is not None
        if part is not self.parameter.grad:
            self.parameter.grad.copy_(part)

    def whole(self) -> Tensor:
        """Return the whole gradient as it is stored, in the parameter's shape; a collective."""
        assert self.parameter.grad is not None
        return self.parameter.grad

    def set_whole(self, gradient: Tensor) -> None:
        """Store this rank's part of a gradient that is the same on all ranks."""
        self.set_part(gradient)


class MeshGradient(Gradient):
    """A gradient of FSDP2 or tensor parallelism."""

    @override
    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        super().__init__(name, parameter)
        if any(placement.is_partial() for placement in self._spread.placements):
            summed = [Replicate() if placement.is_partial() else placement for placement in self._spread.placements]
            parameter.grad = self._spread.redistribute(placements=summed)

    @property
    def _spread(self) -> DTensor:
        assert isinstance(self.parameter.grad, DTensor)
        return self.parameter.grad

    @property
    @override
    def parts(self) -> int:
        axes = zip(self._spread.device_mesh.shape, self._spread.placements, strict=True)
        return math.prod(size for size, placement in axes if not placement.is_replicate())

    @override
    def part(self) -> Tensor:
        return self._spread.to_local()

    @override
    def set_part(self, part: Tensor) -> None:
        self._spread.to_local().copy_(part)

    @override
    def whole(self) -> Tensor:
        return self._spread.full_tensor()

    @override
    def set_whole(self, gradient: Tensor) -> None:
        mesh = self._spread.device_mesh
        copies = DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)
        self.set_part(copies.redistribute(placements=self._spread.placements).to_local())


class Float32Copy(Gradient):
    """A gradient of DeepSpeed's bfloat16 pipeline. Each replica holds all of it in float32."""

    @override
    def part(self) -> Tensor:
        copy = float32_copy(self.parameter)
        assert copy is not None
        return copy

    whole = part

    @override
    def set_part(self, part: Tensor) -> None:
        self.part().copy_(part)


class SlicedGradient(Gradient):
    """A gradient of ZeRO. Each data-parallel rank holds a slice of its numbers in a row."""

    @override
    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        super().__init__(name, parameter)
        self._slice = FlatSlice(parameter)

    @property
    @override
    def parts(self) -> int:
        return dist.get_world_size() if self._is_cut else self._slice.group_size

    @property
    def _is_cut(self) -> bool:
        """Whether AutoTP has cut the parameter itself."""
        return bool(getattr(self.parameter, "tensor_model_parallel", False))

    @property
    @override
    def scale(self) -> float:
        return self._slice.scale

    @override
    def part(self) -> Tensor | None:
        return self._slice.read()

    @override
    def set_part(self, part: Tensor) -> None:
        self._slice.write(part)

    @override
    def whole(self) -> Tensor:
        if self._is_cut:
            raise ConfigurationError(
                f"AutoTP has cut {self.name}, so that no rank can see its gradient whole. Norms and clipping work; for "
                "whole gradients use strategy='azureml_model_parallel'."
            )
        return self._slice.gather()

    @override
    def set_whole(self, gradient: Tensor) -> None:
        part = self.part()
        if part is not None:
            row, start = gradient.flatten(), self._slice.start
            new = part.new_zeros(part.numel())  # ZeRO-3 pads the row after its last number
            numbers = row[start : start + part.numel()]
            new[: numbers.numel()] = numbers
            self.set_part(new.view_as(part))


def gradients_of(module: nn.Module) -> list[Gradient]:
    """List the gradients of a module, in the order of its parameters.

    Under ZeRO, a parameter that the step did not use has one of zeros.

    Raises:
        ConfigurationError: DeepSpeed has no gradients at this moment.
    """
    named = [(name, each) for name, each in module.named_parameters() if each.requires_grad or each.grad is not None]
    managed = [(name, each) for name, each in named if is_of_zero(each)]
    if not managed:
        given = [(name, each) for name, each in named if each.grad is not None]
        return [(MeshGradient if isinstance(each.grad, DTensor) else Gradient)(name, each) for name, each in given]
    if not all(has_gradients(each) for _, each in managed):
        raise ConfigurationError(
            "DeepSpeed has no gradients at this moment: it keeps them from the last backward pass of a step until the "
            "optimizer has stepped. Look at them in on_before_optimizer_step(); in a loop of your own, between "
            "backward() and step()."
        )
    return [(SlicedGradient if float32_copy(each) is None else Float32Copy)(name, each) for name, each in managed]


class Norms:
    """The p-norm of each gradient and that of all together, computed from parts by one or two all-reduces.

    Numbers are added in float64 and in one order, so that all ranks get the same, to the last bit.

    Args:
        gradients: the same on all ranks of `group`.
        norm_type: p; infinity for the largest absolute value.
        device: of the norms if there are no gradients.
        group: ranks that have parts of the same parameters; None if this rank has them whole.
        stages: ranks with the other parameters, one of each stage of a pipeline; None for all other strategies.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        norm_type: float,
        device: torch.device,
        group: ProcessGroup | None,
        stages: ProcessGroup | None = None,
    ) -> None:
        self._p = norm_type
        powers = [self._power(each, 1 if group is None else dist.get_world_size(group)) for each in gradients]
        self._powers = torch.stack(powers) if powers else torch.zeros(0, dtype=torch.float64, device=device)
        if group is not None and powers:
            self._reduce(self._powers, group)
        # Chosen by the host, which knows them: a mask would be copied to the device, for which the host waits.
        counted = [power for power, each in zip(self._powers, gradients, strict=True) if each.counts]
        every = torch.stack([*counted, self._powers.new_zeros(())])
        self._all = every.amax() if self._p == math.inf else every.sum()
        if stages is not None:
            self._reduce(self._all, stages)

    @property
    def total(self) -> Tensor:
        """The norm of all gradients as one vector, a scalar."""
        return self._rooted(self._all)

    @property
    def each(self) -> list[Tensor]:
        """The norms of the single gradients, scalars."""
        return list(self._rooted(self._powers).unbind())

    def _power(self, gradient: Gradient, ranks: int) -> Tensor:
        """Return this rank's share of the sum of powers; for p = infinity, the largest number of its part."""
        part = gradient.part()
        if part is None or part.numel() == 0:
            return torch.zeros((), dtype=torch.float64, device=gradient.parameter.device)
        precise = torch.promote_types(part.dtype, torch.float32)
        norm = torch.linalg.vector_norm(part, self._p, dtype=precise).to(gradient.parameter.device, torch.float64)
        norm = norm / gradient.scale
        power: Tensor = norm if self._p == math.inf else norm.pow(self._p) * (gradient.parts / ranks)
        return power

    def _reduce(self, powers: Tensor, group: ProcessGroup) -> None:
        dist.all_reduce(powers, dist.ReduceOp.MAX if self._p == math.inf else dist.ReduceOp.SUM, group=group)

    def _rooted(self, powers: Tensor) -> Tensor:
        return powers.float() if self._p == math.inf else torch.pow(powers, 1 / self._p).float()


def clip_norm(gradients: Iterable[Gradient], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grads_with_norm_` does."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    change_parts(gradients, lambda part, _: part * factor.to(part.device, part.dtype))


def clip_value(gradients: Iterable[Gradient], value: float) -> None:
    """Limit each number of the gradients to the value and its negative."""
    change_parts(gradients, lambda part, scale: part.clamp(-value * scale, value * scale))


def change_parts(gradients: Iterable[Gradient], change: Callable[[Tensor, float], Any]) -> None:
    """Replace each part of this rank by the result of a function of the part and its scale."""
    with torch.no_grad():
        for each in gradients:
            part = each.part()
            if part is not None:
                each.set_part(change(part, each.scale))
