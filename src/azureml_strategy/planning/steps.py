"""The model of a step: which computation and which communication each strategy does, and what waits for what."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from azureml_strategy.planning.collectives import Fabric
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.kernels import Computation
from azureml_strategy.planning.lanes import Tasks, run_lanes
from azureml_strategy.planning.networks import Network
from azureml_strategy.planning.pipeline_schedule import schedule_1f1b

StrategyName = Literal[
    "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "model_parallel", "pipeline", "local_sgd"
]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How a step is distributed. The defaults are those of conf/strategy.

    Attributes:
        strategy: a file of conf/strategy.
        tensor_parallel_size: GPUs that share each matrix.
        num_stages: stages of a pipeline.
        micro_batches: pieces of a batch in a pipeline.
        accumulate: batches whose gradients are added before they are exchanged.
        bucket_mib: size of DDP's buckets.
        first_bucket_mib: size of the first one. torch makes it small, so that it can be sent early, unless it is given
            the size of the others.
        gradient_bytes: of an element that DDP sends: 4, or 2 with `gradient_compression=bf16` or `fp16`.
        zero_bucket: elements of DeepSpeed's `reduce_bucket_size`.
        period: optimizer steps between two averages of local SGD.
        activation_checkpointing: whether the backward pass computes each block's forward pass again.
    """

    strategy: StrategyName = "ddp"
    tensor_parallel_size: int = 1
    num_stages: int = 1
    micro_batches: int = 4
    accumulate: int = 1
    bucket_mib: float = 25.0
    first_bucket_mib: float = 1.0
    gradient_bytes: int = 4
    zero_bucket: float = 2e8
    period: int = 16
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise PlanError(f"No strategy is known as {self.strategy!r}. Known: {', '.join(STRATEGIES)}.")
        whole = ("tensor_parallel_size", "num_stages", "micro_batches", "accumulate", "period")
        for name in (*whole, "bucket_mib", "first_bucket_mib", "zero_bucket", "gradient_bytes"):
            value = getattr(self, name)
            if not 0 < value < math.inf or (name in whole and value != int(value)):
                raise PlanError(f"{name} is {value}. Give {'1 or more' if name in whole else 'a number above 0'}.")
        if self.tensor_parallel_size > 1 and self.strategy != "model_parallel":
            raise PlanError(
                f"tensor_parallel_size={self.tensor_parallel_size} is planned for model_parallel, not {self.strategy}."
            )

    @property
    def pieces(self) -> int:
        """Micro-batches of a batch, each of which runs all kernels."""
        return self.micro_batches if self.strategy == "pipeline" else 1

    @property
    def model_parallel_size(self) -> int:
        """GPUs that hold one copy of the network together, where they do not hold the same batch."""
        return self.num_stages if self.strategy == "pipeline" else self.tensor_parallel_size


@dataclass(frozen=True)
class StepTime:
    """One optimizer step, in seconds. The parts add up to the whole.

    Attributes:
        compute_s: forward, backward and optimizer.
        communication_s: what communication adds to them: exposed, or by slowing them down.
        bubble_s: what the busiest stage of a pipeline waits.
    """

    compute_s: float
    communication_s: float
    bubble_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.communication_s + self.bubble_s


@dataclass(frozen=True)
class Part:
    """What one unit of a network computes for a batch.

    Attributes:
        name: of the unit.
        elements: of all its parameters.
        trained: of those that are trained.
        forward_s: seconds of the forward pass on one GPU.
        backward_s: of the backward pass; 0 if the unit has none.
    """

    name: str
    elements: float
    trained: float
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Step:
    """What the model of a step is given.

    Attributes:
        parts: the units of the network, in the order of the forward pass; in a pipeline for one micro-batch.
        gradients: elements of each parameter's gradient, and when it is complete: seconds of the backward pass.
        optimizer_s: seconds of the optimizer for all parameters on one GPU.
        adding_s: seconds to add the gradients of a further batch to those that are there, of all parameters on one GPU.
        fabric: all GPUs.
        width: bytes of a parameter or activation that is sent: 2 in `bf16-mixed` and other halves, else 4.
        border_bytes: what a block passes on for one batch, in a pipeline for one micro-batch. A tensor-parallel group
            adds it up twice a block.
        blocks: number of blocks whose matrices a tensor-parallel group shares.
        how: the strategy.
    """

    parts: Sequence[Part]
    gradients: Sequence[tuple[float, float]]
    optimizer_s: float
    adding_s: float
    fabric: Fabric
    width: int
    border_bytes: float
    blocks: int
    how: Distribution

    @property
    def forward_s(self) -> float:
        """The forward pass."""
        return sum(each.forward_s for each in self.parts)

    @property
    def backward_s(self) -> float:
        """The backward pass."""
        return sum(each.backward_s for each in self.parts)

    @property
    def trained(self) -> float:
        """Elements of all parameters that are trained."""
        return sum(each.trained for each in self.parts)


def make_step(
    network: Network,
    computation: Computation,
    optimizer_s: float,
    adding_s: float,
    fabric: Fabric,
    width: int,
    how: Distribution,
    samples: float,
) -> Step:
    """Cut a computation into the network's units; see `Step` for the arguments.

    Args:
        samples: size of the batch that was timed: that of a GPU, or one micro-batch of a pipeline.

    Raises:
        PlanError: the GPUs are no multiple of what holds one copy of the network.
    """
    if fabric.size % how.model_parallel_size:
        raise PlanError(
            f"{how.strategy} holds one copy of the network on {how.model_parallel_size} GPUs, and {fabric.size} are no "
            "multiple of that."
        )
    if how.tensor_parallel_size > 1 and not network.blocks:
        raise PlanError(
            f"tensor_parallel_size={how.tensor_parallel_size}, but what {network.name} passes between blocks is not "
            "known, and so not what the GPUs would add up. Plan it without."
        )
    units = network.units
    forward_ends = [computation.end_of(each.first - 1) if each.first else 0.0 for each in units[1:]]
    starts = [0.0, *forward_ends, computation.forward_s]
    order = sorted((i for i, each in enumerate(units) if each.done >= 0), key=lambda number: units[number].done)
    backward_ends = [computation.end_of(units[number].done) for number in order]
    backward_ends[-1] = computation.total_s
    begun = [computation.forward_s, *backward_ends]
    backward = {number: begun[place + 1] - begun[place] for place, number in enumerate(order)}
    forward = [after - before for before, after in itertools.pairwise(starts)]
    again = forward if how.activation_checkpointing else [0.0] * len(units)
    parts = [
        Part(unit.name, unit.elements, unit.trained, forward[i], backward[i] + again[i] if i in backward else 0.0)
        for i, unit in enumerate(units)
    ]
    slower = sum(each.backward_s for each in parts) / max(computation.total_s - computation.forward_s, 1e-12)
    gradients = [
        (float(each.elements), slower * (computation.end_of(each.after) - computation.forward_s))
        for each in network.operators.gradients
    ]
    border = samples * max(network.tokens, 1) * network.width * width
    return Step(parts, gradients, optimizer_s, adding_s, fabric, width, border, network.blocks, how)


def check_pipeline(how: Distribution, batch_size: float, precision: str) -> None:
    """Refuse what the pipeline strategy refuses (strategies/pipeline/refusals.py and micro_batches.py).

    Raises:
        PlanError: the batch cannot be cut, is accumulated, or is computed in float16.
    """
    if how.strategy != "pipeline":
        return
    if batch_size % how.micro_batches:
        raise PlanError(
            f"A pipeline cannot cut a batch of {batch_size:g} samples into micro_batches={how.micro_batches} equal "
            "ones. Choose a batch size that they divide, or another strategy.micro_batches."
        )
    if how.accumulate > 1:
        raise PlanError(
            f"A pipeline takes no accumulate_grad_batches={how.accumulate}: it accumulates over its micro-batches. "
            "Give larger batches and more strategy.micro_batches."
        )
    if precision.startswith("16"):
        raise PlanError(f"A pipeline does not compute in {precision}. Use bf16-mixed or 32-true, on GPUs that have it.")


def time_step(step: Step) -> StepTime:
    """Time an optimizer step under its strategy.

    Raises:
        PlanError: the strategy cannot run this network.
    """
    how = step.how.strategy
    if how == "pipeline":
        return _pipeline(step)
    if how == "local_sgd":
        return _local_sgd(step)
    if how in ("deepspeed_stage_3", "model_parallel"):
        return _sharded(step)
    return _ddp(step) if how == "ddp" else _zero(step)


def _run(tasks: Tasks, fabric: Fabric) -> StepTime:
    timeline = run_lanes(tasks.listed, fabric.slowest.slowdown if fabric.size > 1 else 0.0)
    return StepTime(timeline.compute_s, timeline.exposed_s)


def _without_exchange(tasks: Tasks, step: Step) -> None:
    """The batches of an accumulated step that exchange nothing."""
    before = step.how.accumulate - 1
    if before:
        tasks.add("accumulated batches", "compute", before * (step.forward_s + step.backward_s + step.adding_s))


def fill_buckets(gradients: Sequence[tuple[float, float]], cap: float, first: float) -> list[tuple[float, float]]:
    """Put gradients into buckets in the order in which they are complete, as DDP does after its first step.

    A bucket is closed by the gradient that makes it as large as its cap, and can be sent when that one is complete.

    Args:
        gradients: size and time of each.
        cap: size of a bucket, in the same unit.
        first: size of the first bucket.

    Returns:
        Size and time of each bucket.
    """
    buckets: list[tuple[float, float]] = []
    filled, limit, last = 0.0, min(first, cap), 0.0
    for size, last in gradients:
        filled += size
        if filled >= limit:
            buckets.append((filled, last))
            filled, limit = 0.0, cap
    return [*buckets, (filled, last)] if filled else buckets


def _ddp(step: Step, fabric: Fabric | None = None) -> StepTime:
    """DDP: a bucket is sent when its last gradient is complete, while the backward pass goes on.

    Buckets are filled with gradients in float32 and compressed afterwards.
    """
    fabric, how = fabric or step.fabric, step.how
    full, sent = 4, how.gradient_bytes
    gradients = [(size * full, at) for size, at in step.gradients]
    buckets = fill_buckets(gradients, how.bucket_mib * _MIB, how.first_bucket_mib * _MIB)
    return _bucketed(
        step, fabric, [(fabric.collective_s("all_reduce", size * sent / full), at) for size, at in buckets]
    )


def _bucketed(
    step: Step,
    fabric: Fabric,
    buckets: Sequence[tuple[float, float]],
    optimizer_s: float | None = None,
    after_s: float = 0.0,
) -> StepTime:
    """A backward pass beside which buckets are sent: seconds and time of each. Then the optimizer, then `after_s`."""
    tasks = Tasks()
    _without_exchange(tasks, step)
    tasks.add("forward", "compute", step.forward_s)
    done, sent = 0.0, None
    for cost, at in buckets:
        computed = tasks.add("backward", "compute", max(at - done, 0.0))
        done = max(at, done)
        sent = tasks.add("bucket", "network", cost, computed)
    tasks.add("backward", "compute", max(step.backward_s - done, 0.0))
    updated = tasks.add("optimizer", "compute", step.optimizer_s if optimizer_s is None else optimizer_s, sent)
    tasks.add("gather parameters", "network", after_s, updated)
    return _run(tasks, fabric)


def _zero(step: Step) -> StepTime:
    """ZeRO stages 1 and 2: gradients go to their owners in large buckets, each updates its part, and all gather it.

    Stage 1 sends no gradient before the last of the accumulated batches; stage 2 after each of them.
    """
    fabric, cap = step.fabric, step.how.zero_bucket
    buckets = fill_buckets(step.gradients, cap, cap)
    costs = [(fabric.collective_s("reduce_scatter", size * step.width), at) for size, at in buckets]
    gathered = fabric.collective_s("all_gather", step.trained * step.width)
    found = _bucketed(step, fabric, costs, step.optimizer_s / fabric.size, gathered)
    if step.how.strategy == "deepspeed_stage_1" or step.how.accumulate == 1:
        return found
    again = (step.how.accumulate - 1) * sum(cost for cost, _ in costs)
    return StepTime(found.compute_s, found.communication_s + again)


def _sharded(step: Step) -> StepTime:
    """FSDP2 and ZeRO-3: a unit's parameters are gathered before it computes, while the unit before it computes, once
    forward and once backward; its gradients are scattered while the next one computes.

    With tensor parallelism, the groups that hold the same part of a matrix share it, and each block adds up what it
    passes on twice forward and twice backward, with nothing to hide behind. Without the streams of GPUs, under gloo,
    nothing is gathered ahead.
    """
    tensor = step.how.tensor_parallel_size
    group = step.fabric.every(tensor) if tensor > 1 else step.fabric
    reduced = 4 if step.how.strategy == "model_parallel" else step.width  # FSDP2 reduces in float32, as our policy says
    inner = step.fabric.inside_node(tensor).collective_s("all_reduce", step.border_bytes) if tensor > 1 else 0.0
    tasks = Tasks()
    before: tuple[int | None, int | None] = (None, None)  # the last two computations
    sent: int | None = None
    for _ in range(step.how.accumulate):
        for forward in (True, False):
            for part in step.parts if forward else _backward_parts(step):
                share = tensor if part.name else 1  # only blocks are cut
                kept = not forward and not part.name and step.how.strategy == "model_parallel"  # FSDP2 keeps its root's
                gather = 0.0 if kept else group.collective_s("all_gather", part.elements / share * step.width)
                ahead = before[0] if group.library == "nccl" else before[1]
                gathered = tasks.add("gather", "network", gather, ahead)
                seconds = (part.forward_s if forward else part.backward_s) / share
                computed = tasks.add(part.name, "compute", seconds, gathered)
                if inner and part.name:
                    reduced_twice = tasks.add("tensor-parallel sum", "network", 2 * inner, computed)
                    computed = tasks.add("", "compute", 0.0, reduced_twice)
                if not forward:
                    cost = group.collective_s("reduce_scatter", part.trained / share * reduced)
                    sent = tasks.add("scatter", "network", cost, computed)
                before = (before[1], computed)
    own_s = step.optimizer_s + (step.how.accumulate - 1) * step.adding_s  # each rank's of its part
    tasks.add("optimizer", "compute", own_s / (group.size * tensor), sent)
    return _run(tasks, group)


def _backward_parts(step: Step) -> list[Part]:
    """The parts that the backward pass needs: frozen ones before the first that is trained are not gathered again."""
    return [each for each in reversed(step.parts) if each.trained or each.backward_s]


def _pipeline(step: Step) -> StepTime:
    """1F1B over stages that hold about as many parameters each, then the replicas' gradients are added up.

    Stages lie across nodes, as DeepSpeed places them: the replicas of a stage are neighbours.
    """
    stages, pieces = step.how.num_stages, step.how.micro_batches
    cut = _stages(step.parts, stages)
    forward = [sum(each.forward_s for each in stage) for stage in cut]
    trained = [sum(each.trained for each in stage) / max(step.trained, 1.0) for stage in cut]
    added = [(pieces - 1) / pieces * step.adding_s * share for share in trained]
    backward = [sum(each.backward_s for each in stage) + add for stage, add in zip(cut, added, strict=True)]
    replicas = step.fabric.size // stages
    across = step.fabric.nodes > 1
    at_once = min(replicas, step.fabric.per_node) if across else 1  # that share what joins the nodes
    sent = step.fabric.send_s(at_once * step.border_bytes, across=across)
    found = schedule_1f1b(forward, backward, pieces, [sent] * (stages - 1))
    group = step.fabric.inside_node(replicas) if replicas > 1 else None
    reduced = group.collective_s("all_reduce", max(trained) * step.trained * step.width) if group else 0.0
    updated = step.optimizer_s * max(trained)
    sends = 2 * (stages - 1) * sent
    bubble = max(found.bubble_s - sends, 0.0)
    return StepTime(found.busiest_s + updated, reduced + found.bubble_s - bubble, bubble)


def _stages(parts: Sequence[Part], stages: int) -> list[list[Part]]:
    """Cut neighbours into stages of about as many parameters, and none without a part."""
    if stages > len(parts):
        raise PlanError(f"A pipeline of {stages} stages needs as many parts of the network, and it has {len(parts)}.")
    whole = max(sum(each.trained for each in parts), 1.0)
    cut: list[list[Part]] = [[]]
    seen = 0.0
    for place, part in enumerate(parts):
        wanted = int((seen + part.trained / 2) / whole * stages)
        must = len(parts) - place <= stages - len(cut)  # one part is left for each further stage
        if cut[-1] and len(cut) < stages and (must or wanted >= len(cut)):
            cut.append([])
        cut[-1].append(part)
        seen += part.trained
    return cut


def _local_sgd(step: Step) -> StepTime:
    """Replicas average their parameters once in a period; a replica is a node, inside which DDP runs."""
    inside = step.fabric.inside_node(step.fabric.per_node) if step.fabric.nodes > 1 else step.fabric
    found = _ddp(step, inside)
    if step.fabric.nodes == 1:
        return found
    averaged = step.fabric.collective_s("all_reduce", 4 * step.trained) / step.how.period
    return StepTime(found.compute_s, found.communication_s + averaged)
