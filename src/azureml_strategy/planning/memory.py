"""The bytes that a GPU holds at the peak of a step, by strategy.

Each strategy is followed through the moments of a step: the forward pass with what the last step left, the backward
pass, the optimizer's step. The peak is the moment that holds most, and its parts are what is shown. What a strategy
allocates was read from our strategies, DeepSpeed 0.19 (`stage_1_and_2.py`, `stage3.py`, `bf16_optimizer.py`), torch
2.13 (`DistributedDataParallel`, `fully_shard`), and checked against real trainings (`benchmarks/planned_memory.py`).

Beside what tensors take, a process on a GPU holds CUDA's context and its kernels, outside of torch's allocator
(`CONTEXT`). Not counted are the buffers of NCCL and the workspace of cuBLAS, which by default takes 8,519,680 bytes
(`CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8`, https://docs.pytorch.org/docs/2.13/notes/cuda.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import torch

from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.footprint import Footprint, Phase, Unit
from azureml_strategy.planning.optimizer_states import OptimizerStates
from azureml_strategy.strategies.equal_buffers import place_weights
from azureml_strategy.strategies.mixed_precision import MIXED
from azureml_strategy.strategies.pipeline.partition import stage_bounds

Name = Literal["ddp", "local_sgd", "zero_1", "zero_2", "zero_3", "fsdp2", "pipeline"]

FRAGMENTATION = 0.15
"""Allowance for what torch's caching allocator cannot use between tensors, as a share of the allocated bytes.

An allocator of Guo et al. 2024 (GMLake, https://arxiv.org/abs/2401.08156) reduces fragmentation by 15 % on average and
by up to 33 %, says the abstract. The average is taken as the allowance where parameters are gathered or activations
recomputed. Elsewhere each step allocates the same sizes in the same order, and nothing is added.
"""
CONTEXT = 1_300_000_000
"""Bytes of CUDA's context and loaded kernels; "the kernels alone take up 1.3GB" on the GPU of
https://huggingface.co/docs/transformers/v4.49.0/model_memory_anatomy. Other GPUs and versions take more or less."""


@dataclass(frozen=True)
class Placement:
    """How a strategy lays a module out over ranks.

    Attributes:
        strategy: one of `Name`.
        replicas: ranks that read different samples; over these the strategy shards.
        tensor_parallel: ranks that share each matrix of the module's plan.
        stages: of a pipeline.
        stage: whose memory is asked for.
        micro_batches: of a pipeline's step.
        partition: how a pipeline is cut, as in `PipelineStrategy`.
        recompute: whether blocks (FSDP2) or layers (pipeline) keep only their inputs.
        accumulate: backward passes of a step.
        bucket_views: whether gradients are views of DDP's buckets.
        reduce_bucket: numbers in a bucket of ZeRO; the default is that of our strategy.
        prefetch: numbers that ZeRO-3 gathers ahead.
        persistent: ZeRO-3 keeps parameters of fewer numbers whole.
        outer: whether local SGD has an outer optimizer with momentum.
    """

    strategy: Name
    replicas: int = 1
    tensor_parallel: int = 1
    stages: int = 1
    stage: int = 0
    micro_batches: int = 4
    partition: str = "parameters"
    recompute: bool = False
    accumulate: int = 1
    bucket_views: bool = True
    reduce_bucket: int = 200_000_000
    prefetch: int = 50_000_000
    persistent: int = 100_000
    outer: bool = True

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Name):
            raise PlanError(f"strategy={self.strategy!r} is unknown. Choose one of {', '.join(get_args(Name))}.")
        for name in ("replicas", "tensor_parallel", "stages", "micro_batches", "accumulate"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}, but there is at least one. Give 1 or more.")
        if self.stages > 1 and self.strategy != "pipeline":
            raise PlanError(f"stages={self.stages} needs strategy='pipeline', and this is {self.strategy!r}.")
        if self.stage not in range(self.stages):
            raise PlanError(f"stage={self.stage}, but stages are counted from 0 to {self.stages - 1}.")
        if self.tensor_parallel > 1 and self.strategy not in ("fsdp2", "zero_1", "zero_2"):
            raise PlanError(
                f"tensor_parallel={self.tensor_parallel} under {self.strategy!r}, which cuts no matrices. Use 'fsdp2', "
                "'zero_1' or 'zero_2'."
            )
        if self.recompute and self.strategy not in ("fsdp2", "pipeline"):
            raise PlanError(
                f"recompute=True, but {self.strategy!r} leaves activation checkpointing to the module. Set it there: "
                "model.network.checkpoint_activations=true. Then trace it again."
            )


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU at the peak of a step.

    Attributes:
        parameters: as the strategy keeps them between steps, and buffers of the module with what watches them.
        optimizer: states, and float32 copies of 16-bit parameters.
        gradients: that are kept at the peak.
        buckets: of gradients on their way.
        gathered: parameters of other ranks.
        activations: with workspaces, and gradients that are being computed.
        workspace: of the optimizer's step.
        fragmentation: allowance, see `FRAGMENTATION`.
        resident: what is held between two steps.
        moment: `forward`, `backward` or `step`, where the peak is.
    """

    parameters: int
    optimizer: int
    gradients: int
    buckets: int
    gathered: int
    activations: int
    workspace: int
    fragmentation: int
    resident: int
    moment: str

    @property
    def allocated(self) -> int:
        """Bytes of all tensors at the peak."""
        parts = ("parameters", "optimizer", "gradients", "buckets", "gathered", "activations", "workspace")
        return sum(getattr(self, name) for name in parts)

    @property
    def total(self) -> int:
        """Bytes of the tensors and of what the allocator cannot use between them."""
        return self.allocated + self.fragmentation

    def text(self) -> str:
        """The parts in one line, the largest first, those of less than a thousandth left out."""
        named = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("resident", "moment")
        }
        shown = [(name, value) for name, value in named.items() if value * 1000 > self.total]
        listed = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in sorted(shown, key=lambda one: -one[1]))
        return f"{self.total / 2**30:.2f} GiB in the {self.moment}: {listed}"


def memory_of(footprint: Footprint, placement: Placement, optimizer: OptimizerStates) -> Memory:
    """Return what a rank holds at the peak of a step.

    Args:
        footprint: of a rank's batch; in a pipeline, of a micro-batch.
        placement: the strategy and its sizes.
        optimizer: what it keeps; under ZeRO of float32 parameters.

    Raises:
        PlanError: the pipeline cannot be cut so.
    """
    sharded = {"zero_1": _zero_12, "zero_2": _zero_12, "zero_3": _zero_3, "fsdp2": _fsdp2, "pipeline": _pipeline}
    moments = sharded.get(placement.strategy, _replicated)(footprint, placement, optimizer)
    peak = max(moments, key=lambda moment: moment.allocated)
    rough = placement.strategy in ("zero_3", "fsdp2") or placement.recompute
    return replace(peak, fragmentation=round(FRAGMENTATION * peak.allocated) if rough else 0)


def naive_bytes(footprint: Footprint, placement: Placement) -> int:
    """Return the usual estimate: 16 bytes a parameter, divided by the ranks that share it, without activations.

    Those are Adam's in mixed precision: 2 of the weight, 2 of the gradient and 12 of the states (Rajbhandari et al.
    2020, section 3.1, https://arxiv.org/abs/1910.02054).
    """
    shards = {"ddp": 1, "local_sgd": 1, "pipeline": placement.stages}.get(placement.strategy, placement.replicas)
    return 16 * footprint.elements // (shards * placement.tensor_parallel)


@dataclass(frozen=True)
class _Moments:
    """Makes the moments of a step from what does not change in it."""

    parameters: float
    optimizer: float
    resident: float

    def at(self, moment: str, activations: float, **parts: float) -> Memory:
        kept = {"gradients": 0.0, "buckets": 0.0, "gathered": 0.0, "workspace": 0.0, **parts}
        whole = {name: round(value) for name, value in kept.items()}
        return Memory(
            parameters=round(self.parameters),
            optimizer=round(self.optimizer),
            activations=round(activations),
            fragmentation=0,
            resident=round(self.resident),
            moment=moment,
            **whole,
        )


def _peak(phases: Sequence[Phase], backward: bool) -> int:
    return max((each.peak for each in phases if each.backward == backward), default=0)


def _rise(phases: Sequence[Phase]) -> int:
    """Return the most of activations and gradients together in a backward pass that starts without gradients."""
    return max((each.with_gradients for each in phases if each.backward), default=0)


def _workspace(footprint: Footprint, optimizer: OptimizerStates, share: float = 1.0) -> float:
    """Return what a step on the module's own tensors needs: of all of them together, or of the largest."""
    sizes = [each.elements * share for each in footprint.weights if each.trainable]
    return optimizer.workspace * (sum(sizes) if optimizer.together else max(sizes, default=0))


def _tensors(footprint: Footprint) -> int:
    return sum(each.trainable for each in footprint.weights)


def _item(footprint: Footprint) -> int:
    return max((each.item for each in footprint.weights), default=4)


def _computing_item(footprint: Footprint) -> int:
    """Return the bytes of a number in the weights that DeepSpeed and FSDP2 compute with."""
    half = MIXED.get(footprint.precision)
    return _item(footprint) if half is None else half.itemsize


def _held_buffers(footprint: Footprint, placement: Placement) -> int:
    """Return the bytes of buffers, and of the table that `EqualBuffers` hashes them with on more than one replica."""
    hashed = footprint.watched > 0 and placement.replicas > 1
    return footprint.buffers + (place_weights(torch.device("meta")).nbytes if hashed else 0)


def _replicated(footprint: Footprint, placement: Placement, optimizer: OptimizerStates) -> list[Memory]:
    item, several = _item(footprint), placement.replicas > 1
    parameters = footprint.elements * item + footprint.buffers
    states = optimizer.kept(footprint.trainable, _tensors(footprint))
    gradients = footprint.trainable * item
    local = placement.strategy == "local_sgd"
    if local and placement.outer and several:
        states += 8 * footprint.trainable  # the common parameters and the outer momentum
    buckets = gradients if several and not local and not placement.bucket_views else 0
    views = several and not local and placement.bucket_views
    moments = _Moments(parameters, states, parameters + states + gradients + buckets)
    backward = moments.at("backward", _rise(footprint.phases), buckets=buckets)
    if views or placement.accumulate > 1:
        backward = moments.at("backward", _peak(footprint.phases, True), gradients=gradients, buckets=buckets)
    # An exchange of local SGD copies the parameters into one row.
    exchanged = gradients if local and several else 0
    workspace = max(_workspace(footprint, optimizer), exchanged)
    return [
        moments.at("forward", _peak(footprint.phases, False), gradients=gradients, buckets=buckets),
        backward,
        moments.at("step", footprint.batch, gradients=gradients, buckets=buckets, workspace=workspace),
    ]


def _cut(footprint: Footprint, placement: Placement) -> tuple[float, float]:
    """Return the numbers of all and of the trained parameters that a rank of a tensor-parallel group has."""
    size = placement.tensor_parallel
    shares = [(each.elements / (size if each.cut else 1), each.trainable) for each in footprint.weights]
    return sum(share for share, _ in shares), sum(share for share, trainable in shares if trainable)


def _zero_12(footprint: Footprint, placement: Placement, optimizer: OptimizerStates) -> list[Memory]:
    """Parameters in one row; a float32 copy of the rank's part, whatever the precision; two buckets in a backward."""
    item, ranks, phases = _computing_item(footprint), placement.replicas, footprint.half_phases
    elements, trained = _cut(footprint, placement)
    part = trained / ranks
    parameters = elements * item + _held_buffers(footprint, placement)
    states = 4 * part + optimizer.kept(part, 1)
    moments = _Moments(parameters, states, parameters + states)
    # A rank's own gradients are copied out of the bucket as they arrive; stage 1 keeps those of all ranks until a step.
    kept = item * (part if placement.strategy == "zero_2" else trained)
    buckets = 2 * placement.reduce_bucket * item
    first = moments.at("backward", _peak(phases, True), buckets=buckets, gradients=_early(trained, placement, kept))
    last = moments.at("backward", phases[-1].end, buckets=buckets, gradients=kept)
    workspace = 4 * part + optimizer.workspace * part
    return [
        moments.at("forward", _peak(phases, False)),
        first,
        last,
        moments.at("step", footprint.batch, gradients=kept, workspace=workspace),
    ]


def _early(trained: float, placement: Placement, kept: float) -> float:
    """Return the gradients that lie outside of buckets when activations are most: none before a bucket is full."""
    return kept if trained > placement.reduce_bucket or placement.accumulate > 1 else 0.0


def _zero_3(footprint: Footprint, placement: Placement, optimizer: OptimizerStates) -> list[Memory]:
    """Parts of parameters, their float32 copies and gradients for good, one bucket, and what is gathered."""
    item, ranks, phases = _computing_item(footprint), placement.replicas, footprint.half_phases
    part, trained = footprint.elements / ranks, footprint.trainable / ranks
    whole = ranks > 1  # a single rank's part is the whole
    small = [each.elements for each in footprint.weights if each.elements <= placement.persistent]
    persistent = sum(small) * item * whole
    summed = 4 if placement.accumulate > 1 else item
    parameters = part * item + _held_buffers(footprint, placement)
    gradients, buckets = trained * summed, placement.reduce_bucket * item
    states = 4 * trained + optimizer.kept(trained, 1)
    moments = _Moments(parameters, states, parameters + states + gradients + buckets + persistent)
    fixed = {"gradients": gradients, "buckets": buckets}
    found = [
        moments.at(
            "backward" if phase.backward else "forward",
            phase.peak,
            gathered=persistent + _ahead(footprint.units, phase, placement) * item * whole,
            **fixed,
        )
        for phase in phases
    ]
    workspace = 4 * trained + optimizer.workspace * trained
    return [*found, moments.at("step", footprint.batch, gathered=persistent, workspace=workspace, **fixed)]


def _ahead(units: Sequence[Unit], phase: Phase, placement: Placement) -> int:
    """Return the numbers of a unit's large parameters and of those that are gathered ahead."""
    large = [sum(w.elements for w in unit.weights if w.elements > placement.persistent) for unit in units]
    here = large[phase.unit] if phase.unit >= 0 else 0
    rest = sum(large) - here
    return here + min(placement.prefetch, rest)


def _fsdp2(footprint: Footprint, placement: Placement, optimizer: OptimizerStates) -> list[Memory]:
    """Shards in the module's type; the root and one block with the next are gathered in the type to compute with."""
    ranks, item, size = placement.replicas, _item(footprint), placement.tensor_parallel
    compute, reduce = _computing_item(footprint), _item(footprint)
    elements, trained = _cut(footprint, placement)
    parameters = elements / ranks * item + _held_buffers(footprint, placement)
    states = optimizer.kept(trained / ranks, _tensors(footprint))
    gradients = trained / ranks * item
    moments = _Moments(parameters, states, parameters + states + gradients)
    blocks = [sum(w.elements / (size if w.cut else 1) for w in unit.weights) * unit.block for unit in footprint.units]
    trains = [
        sum(w.elements / (size if w.cut else 1) for w in unit.weights if w.trainable) * unit.block
        for unit in footprint.units
    ]
    root, root_trains = elements - sum(blocks), trained - sum(trains)
    largest, most_trained = max(blocks, default=0), max(trains, default=0)
    # The first block's row is copied out while the next one arrives.
    ahead = (2 if ranks > 1 else 1) * largest
    phases = _recomputed(footprint) if placement.recompute else footprint.half_phases
    found, done = [], 0
    for phase in phases:
        done += phase.gradients
        in_block = phase.unit >= 0 and footprint.units[phase.unit].block
        gathered = compute * (root + (ahead if in_block else 0))
        # A block's gradients are reduced from one row; those of the root stay whole until the end.
        buckets = (reduce * most_trained * (ranks > 1) if in_block else 0) if phase.backward else 0
        of_root = compute * root_trains if phase.backward else 0
        # Those of the last step are there until the backward pass begins.
        sum_of = done / max(footprint.trainable, 1) if phase.backward and placement.accumulate == 1 else 1
        moment = "backward" if phase.backward else "forward"
        found.append(
            moments.at(moment, phase.peak, gathered=gathered, buckets=buckets, gradients=gradients * sum_of + of_root)
        )
    workspace = _workspace(footprint, optimizer, trained / max(footprint.trainable, 1) / ranks)
    return [*found, moments.at("step", footprint.batch, gradients=gradients, workspace=workspace)]


def _recomputed(footprint: Footprint, all_units: bool = False) -> tuple[Phase, ...]:
    """Return the phases of a step in which blocks keep their inputs alone, and are computed again backward."""
    saved: dict[int, Phase] = {}
    found, shift = [], 0
    for phase in footprint.half_phases:
        recomputes = phase.unit >= 0 and (all_units or footprint.units[phase.unit].block)
        moved = replace(phase, start=phase.start + shift, peak=phase.peak + shift, end=phase.end + shift)
        if recomputes and not phase.backward:
            saved[phase.unit] = phase
            shift -= max(phase.end - phase.start - phase.output, 0)
            moved = replace(moved, end=phase.end + shift)
        elif recomputes:
            forward = saved[phase.unit]
            inside = max(forward.end - forward.start - forward.output, 0)
            shift += inside
            moved = replace(phase, start=phase.start + shift - inside, peak=phase.peak + shift, end=phase.end + shift)
        found.append(moved)
    return tuple(found)


def _pipeline(footprint: Footprint, placement: Placement, optimizer: OptimizerStates) -> list[Memory]:
    """A stage's parameters; in 1F1B, stage i of p keeps min(p - i, m) micro-batches (Narayanan et al. 2021)."""
    start, stop = _bounds(footprint, placement)
    units = footprint.units[start:stop]
    copies = sum(unit.tied for unit in units) // _item(footprint) * (placement.stages > 1)
    mixed = footprint.precision == "bf16-mixed"
    item, trained = _computing_item(footprint), sum(unit.trainable for unit in units) + copies
    elements = sum(unit.elements for unit in units) + copies
    phases = _of_units(_recomputed(footprint, True) if placement.recompute else footprint.half_phases, start, stop)
    if placement.stage < placement.stages - 1:
        phases = [each for each in phases if each.unit >= 0]
    forward = [each for each in phases if not each.backward]
    kept = sum(each.end - each.start for each in forward if each.unit >= 0)
    base = min((each.start for each in phases), default=0)
    flying = min(placement.stages - placement.stage, placement.micro_batches)
    # DeepSpeed keeps the last outputs of its buffers; the last stage's are those of all micro-batches.
    outputs = [each.output for each in forward if each.output]
    several = placement.stages > 1
    held = placement.micro_batches if placement.stage == placement.stages - 1 else 1
    received = [each.output for each in footprint.half_phases if each.unit == start - 1 and not each.backward]
    buffers = held * outputs[-1] + sum(received) if several and outputs else 0
    parameters = elements * item + _held_buffers(footprint, placement)
    part = trained / placement.replicas if mixed else trained
    tensors = 2 if mixed else sum(w.trainable for unit in units for w in unit.weights)
    states = (4 * part if mixed else 0) + optimizer.kept(part, tensors)
    gradients = trained * item + (4 * trained if mixed else 0)
    resident = parameters + states + buffers + (4 * trained if mixed else 0)
    moments = _Moments(parameters, states, resident)
    highest = max((each.peak for each in phases), default=base) - base
    largest = max((w.elements for unit in units for w in unit.weights if w.trainable), default=0)
    workspace = optimizer.workspace * (part if mixed or optimizer.together else largest)
    return [
        moments.at("backward", (flying - 1) * kept + highest, gradients=gradients, buckets=buffers),
        moments.at("step", footprint.batch, gradients=gradients, workspace=workspace, buckets=buffers),
    ]


def _of_units(phases: Sequence[Phase], start: int, stop: int) -> list[Phase]:
    """Return a stage's phases: those of its units and those between them; on the last stage the loss is between."""
    own = [index for index, each in enumerate(phases) if start <= each.unit < stop]
    span = phases[own[0] : own[-1] + 1] if own else []
    return [each for each in span if start <= each.unit < stop or each.unit < 0]


def _bounds(footprint: Footprint, placement: Placement) -> tuple[int, int]:
    units = footprint.units[:-1]
    if not any(unit.kind for unit in units):
        raise PlanError(
            "strategy='pipeline', but the module has no chain of layers to cut. Give it pipeline_layers() and "
            "pipeline_batch(), as the page `Pipeline parallelism` shows, or plan another strategy."
        )
    item = _item(footprint)
    trained = [unit.trainable + unit.tied // item for unit in units]
    try:
        bounds = stage_bounds(trained, [unit.kind for unit in units], placement.stages, placement.partition)
    except ValueError as error:
        raise PlanError(str(error)) from error
    return bounds[placement.stage], bounds[placement.stage + 1]
