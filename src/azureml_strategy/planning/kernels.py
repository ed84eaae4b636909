"""What a step's operators take on a GPU: a roofline of operations and bytes, run one by one or fused by a compiler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.gpus import GPU, Kind
from azureml_strategy.planning.operators import Operator, Operators

_TERA, _GIGA = 1e12, 1e9
_FLOAT32, _HALF = 4, 2  # bytes of an element
# Lightning's precisions, by the type in which tensor cores compute.
_HALVES: Mapping[str, Kind] = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "16", "16-true": "16"}
_BOUND_BY_OPERATIONS = ("convolution", "product", "attention")


@dataclass(frozen=True)
class Efficiency:
    """Which part of a GPU's peaks software reaches. Fitted values are in fitted.toml, with their sources.

    Attributes:
        convolution: share of the peak of operations that convolutions reach, 0 to 1.
        product: the same of matrix products whose sizes are multiples of 8.
        unaligned: factor of that for other sizes, which tensor cores do not take; a compiler pads them.
        attention: share of the peak that fused attention reaches.
        memory: share of the memory bandwidth that kernels reach.
        kernel_s: seconds that the GPU takes to begin and end a kernel.
        host_s: seconds of the host for each operator that it launches by itself.
        compiled_host_s: the same for a compiled graph's kernel.
    """

    convolution: float
    product: float
    unaligned: float
    attention: float
    memory: float
    kernel_s: float
    host_s: float
    compiled_host_s: float


@dataclass(frozen=True)
class Kernels:
    """Kernels as columns: one row each, in the order in which they run.

    Attributes:
        flops: operations.
        elements: of activations and gradients, read and written.
        wide: the part of `elements` that is in float32 whatever the precision.
        weights: elements of parameters that are read.
        kind: index into `_BOUND_BY_OPERATIONS`, or -1 where memory bounds.
        aligned: whether tensor cores take a product's sizes.
        last: index of the last operator in each.
        backward: whether each belongs to the backward pass.
    """

    flops: NDArray[np.float64]
    elements: NDArray[np.float64]
    wide: NDArray[np.float64]
    weights: NDArray[np.float64]
    kind: NDArray[np.int64]
    aligned: NDArray[np.bool_]
    last: NDArray[np.int64]
    backward: NDArray[np.bool_]
    compiled: bool


@dataclass(frozen=True)
class Computation:
    """A forward and backward pass on one GPU, in seconds.

    Attributes:
        device_s: of each kernel.
        memory_s: of the kernels that memory bounds.
        host_s: that the host takes to launch all of them.
        ends: when each kernel ends, counted from the start of the step; the host may be what it waits for.
        kernels: what was timed.
    """

    device_s: NDArray[np.float64]
    memory_s: float
    host_s: float
    ends: NDArray[np.float64]
    kernels: Kernels

    @property
    def total_s(self) -> float:
        """Forward and backward together."""
        return float(self.ends[-1]) if len(self.ends) else 0.0

    @property
    def is_launch_bound(self) -> bool:
        """Whether the GPU waits for the host, and not the other way round."""
        return self.host_s > float(self.device_s.sum())

    @cached_property
    def forward_s(self) -> float:
        """The forward pass."""
        forward = self.ends[~self.kernels.backward]
        return float(forward[-1]) if len(forward) else 0.0

    def end_of(self, operator: int) -> float:
        """When the kernel with this operator ends."""
        place = int(np.searchsorted(self.kernels.last, operator))
        return float(self.ends[min(place, len(self.ends) - 1)])


@lru_cache(maxsize=32)
def kernels_of(operators: Operators, compiled: bool) -> Kernels:
    """List the kernels of a step: an operator is one each, or a compiler has joined what only memory bounds.

    A fused kernel reads what comes from outside of it and writes what is needed after it. Batch normalisation reads
    its input twice, because the statistics must be known first.
    """
    rows = list(_fused(operators.listed) if compiled else map(_single, range(len(operators.listed)), operators.listed))
    columns = list(zip(*rows, strict=True))
    kinds = [_BOUND_BY_OPERATIONS.index(kind) if kind in _BOUND_BY_OPERATIONS else -1 for kind in columns[4]]
    flops, elements, wide, weights = (np.array(each, dtype=np.float64) for each in columns[:4])
    return Kernels(
        flops=flops,
        elements=elements,
        wide=wide,
        weights=weights,
        kind=np.array(kinds),
        aligned=np.array(columns[5]) | compiled,
        last=np.array(columns[6]),
        backward=np.array(columns[7]),
        compiled=compiled,
    )


_Row = tuple[float, float, float, float, str, bool, int, bool]


def _single(number: int, each: Operator) -> _Row:
    elements = each.reads + each.writes
    wide = elements if each.in_float32 else 0.0
    return each.flops, elements, wide, each.weights, each.kind, each.aligned, number, each.backward


def _fused(operators: Sequence[Operator]) -> Iterator[_Row]:
    """Join neighbours that only memory bounds."""
    last_read = {number: place for place, each in enumerate(operators) for number in each.inputs}
    group: list[int] = []
    for place, each in enumerate(operators):
        heavy = each.kind in _BOUND_BY_OPERATIONS
        if group and (heavy or each.backward != operators[group[-1]].backward):
            yield _join(operators, group, last_read)
            group = []
        if heavy:
            yield _single(place, each)
        else:
            group.append(place)
    if group:
        yield _join(operators, group, last_read)


def _join(operators: Sequence[Operator], group: Sequence[int], last_read: dict[int, int]) -> _Row:
    made: set[int] = set()
    read: dict[int, float] = {}
    again, written = 0.0, 0.0
    for place in group:
        each = operators[place]
        sizes = dict(zip([*each.inputs, *each.outputs], each.sizes, strict=True))
        for number in each.inputs:
            if number not in made:
                read[number] = max(read.get(number, 0.0), sizes[number])
            if each.kind == "batch_norm":
                again += sizes[number]
        for number in each.outputs:
            if number not in made and last_read.get(number, -1) > group[-1]:
                written += sizes[number]
            made.add(number)
    weights = sum(operators[place].weights for place in group)
    elements = sum(read.values()) + again + written
    return 0.0, elements, 0.0, weights, "memory", True, group[-1], operators[group[-1]].backward


def compute(
    kernels: Kernels,
    gpu: GPU,
    precision: str,
    efficiency: Efficiency,
    scale: float = 1.0,
    factor: float = 1.0,
    host_factor: float = 1.0,
) -> Computation:
    """Time a step's kernels on a GPU.

    Each takes as long as the slower of its operations and its bytes: `max(flops / (share x peak), bytes / (share x
    bandwidth))`, and a constant to begin and end. The host launches them in order and runs ahead as far as it can.

    Args:
        kernels: of a batch.
        gpu: its peaks are those of its data sheet.
        precision: Lightning's name of it; float32 is computed without TF32, `tf32` with it.
        efficiency: shares that software reaches.
        scale: the batch divided by that of the kernels.
        factor: by which measured steps of this GPU are longer than those of the roofline.
        host_factor: by which the host takes longer to launch a kernel than `efficiency` says.

    Raises:
        LookupError: the GPU has no peak at this precision.
    """
    width = _HALF if precision in _HALVES else _FLOAT32
    shares = np.array([efficiency.convolution, efficiency.product, efficiency.attention, 1.0])[kernels.kind]
    shares = np.where(kernels.aligned, shares, shares * efficiency.unaligned)
    operations = scale * kernels.flops / (shares * peak(gpu, precision))
    activations = scale * (kernels.elements * width + kernels.wide * (_FLOAT32 - width))
    # Under autocast a weight is read as float32 and written as a half, once, before it is read as a half.
    weight = width if precision.endswith("-true") or width == _FLOAT32 else _FLOAT32 + 2 * width
    memory = (activations + kernels.weights * weight) / (efficiency.memory * gpu.memory_bandwidth * _GIGA)
    device = factor * (np.maximum(operations, memory) + efficiency.kernel_s)
    host = host_factor * (efficiency.compiled_host_s if kernels.compiled else efficiency.host_s)
    of_memory = float(device[memory > operations].sum())
    return Computation(device, of_memory, host * len(device), _ends(device, host), kernels)


def _ends(device_s: NDArray[np.float64], host_s: float) -> NDArray[np.float64]:
    """When kernels end that begin after the one before, and not before the host has launched them."""
    launched = host_s * np.arange(1, len(device_s) + 1)
    before = np.concatenate([[0.0], np.cumsum(device_s)[:-1]])
    # end[i] = max(end[i-1], launched[i]) + device[i], which is the cumulated time and the largest lag so far
    return np.cumsum(device_s) + np.maximum.accumulate(launched - before)


def peak(gpu: GPU, precision: str) -> float:
    """Floating-point operations per second that a GPU can do at one of Lightning's precisions, or in `tf32`.

    A GPU without bf16 computes in float32 what autocast would compute in bf16.

    Raises:
        LookupError: the data sheet has no such figure, or the planner does not know the precision.
    """
    if precision not in (*_HALVES, "32-true", "tf32"):
        known = ", ".join([*_HALVES, "32-true", "tf32"])
        raise LookupError(f"No speed is known of precision {precision!r}. Known: {known}.")
    kind: Kind = _HALVES.get(precision, "tf32" if precision == "tf32" else "32")
    found = gpu.peaks.get(kind) or gpu.peaks.get("32")
    if not found:
        raise LookupError(f"{gpu.name} has no published peak for {precision}.")
    return found * _TERA
