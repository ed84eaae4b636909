"""Compares VM sizes, numbers of nodes and strategies for a run: time, cost, and which of them is the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from azureml_strategy.cluster.job import Price
from azureml_strategy.gpus import GPU, gpu_of
from azureml_strategy.network.vm_sizes import VMSize, bare_name
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.fits import MemoryOf, fits
from azureml_strategy.planning.fitted import Parameters
from azureml_strategy.planning.memory import CONTEXT, Memory
from azureml_strategy.planning.predict import MeasuredStep, Prediction, predict
from azureml_strategy.planning.steps import STRATEGIES, Distribution
from azureml_strategy.planning.workload import Workload
from azureml_strategy.strategies.model_parallel.module import HasTensorParallelPlan

TIERS = ("dedicated", "low_priority")
"""Of Azure ML's compute clusters."""
PriceOf = Callable[[VMSize], Price | None]

_STRATEGIES = "azureml_strategy.strategies."


@dataclass(frozen=True)
class Candidate:
    """One way to run it.

    Attributes:
        size: the VM size.
        nodes: how many of it.
        how: the strategy with its settings.
        prediction: of the rate.
        hours: to the end of the run; None if the recipe does not say its end.
        cost: of all nodes for that time; None without a price.
        price: of a node.
        memory: of the fullest GPU; None if it is not known.
        fits: whether that and CUDA's own memory are less than the GPU has; None if it is not known.
        tier: of the nodes, `dedicated` or `low_priority`.
    """

    size: VMSize
    nodes: int
    how: Distribution
    prediction: Prediction
    hours: float | None
    cost: float | None
    price: Price | None
    memory: Memory | None
    fits: bool | None
    tier: str = "dedicated"

    @property
    def memory_bytes(self) -> int | None:
        """What the fullest GPU holds, with CUDA's own memory."""
        return None if self.memory is None else self.memory.total + CONTEXT

    @property
    def has_end(self) -> bool:
        """Whether hours and cost are known."""
        return self.hours is not None and self.cost is not None

    @property
    def strategy(self) -> str:
        """The strategy in words."""
        if self.how.strategy == "pipeline":
            return f"pipeline, {self.how.num_stages} stages"
        if self.how.tensor_parallel_size > 1:
            return f"{self.how.strategy}, tensor parallel {self.how.tensor_parallel_size}"
        return self.how.strategy

    @property
    def is_scaled_out(self) -> bool:
        """Whether it takes several nodes."""
        return self.nodes > 1

    @property
    def cost_per_million(self) -> float | None:
        """Cost of a million samples; None without a price."""
        if self.price is None:
            return None
        return self.nodes * self.price.per_hour / 3600 * 1e6 / self.prediction.samples_per_second


@dataclass(frozen=True)
class Plan:
    """All candidates of a workload, and what could not be planned.

    Attributes:
        workload: what is run.
        candidates: the best first.
        left_out: a sentence for each size, number of nodes or strategy that cannot run it.
        rank: `cost` or `time`.
        ends_by_steps: whether hours are those of a number of steps, not of samples.
        notes: what was assumed and what was not counted, in sentences.
    """

    workload: Workload
    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...]
    rank: str
    ends_by_steps: bool = False
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate | None:
        """The first candidate."""
        return self.candidates[0] if self.candidates else None

    def of_places(self) -> list[Candidate]:
        """The best candidate of each size and number of nodes, the best first."""
        found: dict[tuple[str, int], Candidate] = {}
        for each in self.candidates:
            found.setdefault((each.size.name, each.nodes), each)
        return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is compared, and by what.

    Attributes:
        sizes: VM sizes.
        nodes: numbers of nodes.
        strategies: names of conf/strategy; empty for the recipe's own and those that need no other setting.
        budget: the most that the run may cost, in the prices' currency.
        deadline: the most hours that it may take.
        rank: `cost` or `time`.
        samples: that the run trains on, where the recipe does not say it.
        measured: a step of the recipe on one GPU.
        loader_rate: samples per second that the data pipeline gives each GPU at most.
        across_gb: bus bandwidth between nodes in place of the sizes' own, in GB/s.
        across_of: the VM size on which that was measured, for which alone it counts; None for all.
        tier: of the nodes, one of `TIERS`.

    Raises:
        PlanError: a number is not above 0 or not finite, or nobody knows the tier.
    """

    sizes: Sequence[VMSize]
    nodes: Sequence[int] = (1,)
    strategies: Sequence[str] = ()
    budget: float | None = None
    deadline: float | None = None
    rank: str = "cost"
    samples: float | None = None
    measured: MeasuredStep | None = None
    loader_rate: float | None = None
    across_gb: float | None = None
    across_of: str | None = None
    tier: str = "dedicated"

    def __post_init__(self) -> None:
        for name in ("budget", "deadline", "samples", "loader_rate", "across_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise PlanError(f"{name} is {value}. Give a number above 0.")
        if self.tier not in TIERS:
            raise PlanError(f"tier is {self.tier!r}. Give {' or '.join(TIERS)}.")

    def across_on(self, size: VMSize) -> float | None:
        """The bus bandwidth between nodes of a size that was measured on it."""
        of = self.across_of
        return self.across_gb if of is None or bare_name(of).lower() == bare_name(size.name).lower() else None


def make_plan(workload: Workload, wanted: Wanted, price_of: PriceOf, parameters: Parameters | None = None) -> Plan:
    """Predict every candidate, and put those that meet budget and deadline first.

    Args:
        workload: of a recipe.
        wanted: what to compare.
        price_of: the price of a node of a size; None if it is not known.
        parameters: fitted numbers in place of fitted.toml.

    Raises:
        PlanError: a strategy is unknown, or a number is not positive.
    """
    for name in wanted.strategies:
        if name not in STRATEGIES:
            raise PlanError(f"No strategy is known as {name!r}. Known: {', '.join(STRATEGIES)}.")
    for count in wanted.nodes:
        if count < 1:
            raise PlanError(f"--nodes has {count}. A job has at least one node.")
    candidates: list[Candidate] = []
    left_out: dict[str, None] = {}
    memory_of = MemoryOf(workload)
    for size in wanted.sizes:
        gpu = gpu_of(size)
        if gpu is None or not size.gpus:
            left_out[f"{size.name} has no GPU whose peaks are known."] = None
            continue
        price = price_of(size)
        for nodes in wanted.nodes:
            for how in _distributions(workload, wanted, size, nodes):
                try:
                    found = _predict(workload, wanted, size, gpu, nodes, how, parameters)
                    memory = memory_of(precision_on(workload, gpu), how, found.gpus)
                except PlanError as error:
                    left_out[str(error)] = None
                    continue
                hours = _hours(workload, wanted, found)
                cost = None if hours is None or price is None else hours * nodes * price.per_hour
                held = fits(memory, gpu)
                candidates.append(Candidate(size, nodes, how, found, hours, cost, price, memory, held, wanted.tier))
    left_out |= dict.fromkeys(memory_of.unknown)
    if not wanted.strategies and workload.strategy not in STRATEGIES:
        left_out[f"The recipe's own strategy, {workload.strategy}, is not planned: others stand in its place."] = None
    ranked = sorted(candidates, key=lambda each: _order(each, wanted))
    by_steps = any(_end_by_steps(workload, wanted, each.prediction) for each in ranked)
    return Plan(workload, tuple(ranked), tuple(left_out), wanted.rank, by_steps, tuple(_notes(workload, wanted)))


def _notes(workload: Workload, wanted: Wanted) -> Iterator[str]:
    yield from filter(None, ("" if wanted.samples else workload.data_note, workload.optimizer_note))
    if workload.uncounted:
        yield f"Not counted: {', '.join(workload.uncounted)}."
    if wanted.across_gb is not None:
        of = "names no VM size, so it counts for all" if wanted.across_of is None else f"counts for {wanted.across_of}"
        yield f"The measured {wanted.across_gb:.4g} GB/s between nodes {of}."


def _end_by_steps(workload: Workload, wanted: Wanted, found: Prediction) -> bool:
    """Whether the recipe's number of steps ends the run, and not its samples or those that are asked for."""
    if wanted.samples is not None or workload.steps is None:
        return False
    return workload.samples is None or workload.steps * found.step_s < workload.samples / found.samples_per_second


def _hours(workload: Workload, wanted: Wanted, found: Prediction) -> float | None:
    """Hours to the end of the run, which so many samples or, as the recipe says, so many steps are."""
    total = wanted.samples or workload.samples
    if workload.steps is not None and _end_by_steps(workload, wanted, found):
        return workload.steps * found.step_s / 3600
    return None if total is None else total / found.samples_per_second / 3600


def _distributions(workload: Workload, wanted: Wanted, size: VMSize, nodes: int) -> Iterator[Distribution]:
    """The strategies to compare, with the settings of the recipe where it is the recipe's own."""
    own = workload.strategy if workload.strategy in STRATEGIES else "ddp"
    per_node = workload.gpus_per_node or size.gpus or 1
    others = ("ddp", "deepspeed_stage_2", "deepspeed_stage_3", "model_parallel")
    # Recipes of the others give their strategy settings that these do not take.
    names = wanted.strategies or dict.fromkeys((own, *others) if own in others else (own,))
    for name in names:
        base = own_settings(workload, own) if name == own else Distribution(strategy=name)  # type: ignore[arg-type]
        base = replace(base, accumulate=workload.accumulate)
        if name == "pipeline":
            yield replace(base, num_stages=base.num_stages if base.num_stages > 1 else _auto_stages(per_node * nodes))
        elif name == "model_parallel" and workload.network.blocks and base.tensor_parallel_size == 1:
            yield base
            if per_node > 1 and _shares_matrices(workload, per_node):
                yield replace(base, tensor_parallel_size=per_node)
        elif name != "local_sgd" or nodes > 1:
            yield base


def _shares_matrices(workload: Workload, size: int) -> bool:
    """Whether so many GPUs can share the network's matrices: it has a plan, and its heads divide."""
    counts: Mapping[str, int] = getattr(workload.module, "tensor_parallel_counts", dict)()
    return bool(counts) and all(count % size == 0 for count in counts.values())


def _auto_stages(processes: int) -> int:
    """What `num_stages: auto` is: see strategies/pipeline."""
    return min(2, processes)


def own_distribution(workload: Workload, nodes: int, per_node: int) -> Distribution:
    """The recipe's own strategy, with `auto` as it resolves it on so many GPUs of each node.

    Raises:
        PlanError: the strategy is not planned, or is a class of the user's.
    """
    target = str(workload.settings.get("_target_", _STRATEGIES))
    if workload.strategy not in STRATEGIES or not target.startswith(_STRATEGIES):
        name = workload.strategy if target.startswith(_STRATEGIES) else target
        raise PlanError(f"The recipe's own strategy, {name}, is not planned.")
    found = replace(own_settings(workload, workload.strategy), accumulate=workload.accumulate)
    if workload.strategy == "pipeline" and workload.settings.get("num_stages") == "auto":
        return replace(found, num_stages=_auto_stages(nodes * per_node))
    is_auto = workload.settings.get("tensor_parallel_size") == "auto"
    if workload.strategy == "model_parallel" and is_auto and isinstance(workload.module, HasTensorParallelPlan):
        return replace(found, tensor_parallel_size=per_node)
    return found


def own_settings(workload: Workload, name: str) -> Distribution:
    """The settings of the recipe's strategy section, where they are numbers that this model has, too."""
    given = {
        "tensor_parallel_size": workload.settings.get("tensor_parallel_size"),
        "num_stages": workload.settings.get("num_stages"),
        "micro_batches": workload.settings.get("micro_batches"),
        "bucket_mib": workload.settings.get("bucket_cap_mb"),
        "first_bucket_mib": workload.settings.get("first_bucket_mb") or workload.settings.get("bucket_cap_mb"),
        "zero_bucket": workload.settings.get("reduce_bucket_size"),
        "period": workload.settings.get("period"),
    }
    numbers = {name: value for name, value in given.items() if isinstance(value, (int, float))}
    halves = workload.settings.get("gradient_compression") in ("bf16", "fp16")
    return Distribution(
        strategy=name,  # type: ignore[arg-type]
        gradient_bytes=2 if halves else 4,
        activation_checkpointing=_recomputes(workload),
        **numbers,  # type: ignore[arg-type]
    )


def _recomputes(workload: Workload) -> bool:
    """Whether the recipe's own strategy computes blocks again backward."""
    return bool(workload.settings.get("activation_checkpointing"))


def best_precision(gpu: GPU) -> str:
    """The precision that a recipe takes on a GPU by itself: see `azureml.precision` in training/resolvers.py."""
    if "bf16" in gpu.peaks:
        return "bf16-mixed"
    return "16-mixed" if "16" in gpu.peaks else "32-true"


def precision_on(workload: Workload, gpu: GPU) -> str:
    """The precision in which a GPU computes the recipe: `tf32` for float32 where the recipe allows it."""
    precision = workload.precision or best_precision(gpu)
    return "tf32" if precision == "32-true" and workload.tf32 and "tf32" in gpu.peaks else precision


def _compiles(workload: Workload, how: Distribution) -> bool:
    """Whether a candidate compiles: the recipe's strategy as it says, DDP as the recipe says, others do not."""
    if how.strategy == workload.strategy:
        return workload.compiled
    return workload.ddp_compiled and how.strategy == "ddp"


def _predict(
    workload: Workload,
    wanted: Wanted,
    size: VMSize,
    gpu: GPU,
    nodes: int,
    how: Distribution,
    parameters: Parameters | None,
) -> Prediction:
    return predict(
        workload.network,
        batch_size=workload.batch_size,
        gpu=gpu.name,
        vm_size=size.name,
        nodes=nodes,
        gpus_per_node=workload.gpus_per_node,
        precision=precision_on(workload, gpu),
        compiled=_compiles(workload, how),
        strategy=how,
        optimizer=workload.optimizer,
        across_gb=wanted.across_on(size),
        measured=wanted.measured and replace(wanted.measured, recomputes=_recomputes(workload)),
        loader_rate=wanted.loader_rate,
        parameters=parameters,
    )


def predict_own(workload: Workload, size: VMSize, nodes: int) -> tuple[Distribution, Prediction]:
    """Predict a recipe with its own strategy on all GPUs of so many nodes, without what it holds.

    Raises:
        PlanError: the GPU or the strategy is not known to the planner, or the strategy cannot run the recipe there.
    """
    gpu = gpu_of(size)
    if gpu is None or not size.gpus:
        raise PlanError(f"{size.name} has no GPU whose peaks are known.")
    how = own_distribution(workload, nodes, size.gpus)
    return how, _predict(workload, Wanted(sizes=[size]), size, gpu, nodes, how, None)


def _order(candidate: Candidate, wanted: Wanted) -> tuple[Any, ...]:
    too_large = candidate.fits is False
    late = wanted.deadline is not None and (candidate.hours is None or candidate.hours > wanted.deadline)
    dear = wanted.budget is not None and (candidate.cost is None or candidate.cost > wanted.budget)
    time = 1 / candidate.prediction.samples_per_second
    cost = candidate.cost_per_million
    if wanted.rank == "time":
        return too_large, late or dear, time
    return too_large, late or dear, cost is None, cost or 0.0, time


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other one beats in both time and cost, the fastest first."""
    found: list[Candidate] = []
    for each in sorted(filter(lambda one: one.has_end, candidates), key=lambda one: (one.hours, one.cost)):
        if not found or (each.cost or 0) < (found[-1].cost or 0):
            found.append(each)
    return found
