"""Predicts how fast a network trains on GPUs: one documented function, `predict`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType

from azureml_strategy.gpus import GPU, find_gpu, gpu_of, known_gpus
from azureml_strategy.network.vm_sizes import VMSize, lookup_vm_size
from azureml_strategy.planning.collectives import Fabric, Library, Tier
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.fabrics import Joined, NetworkKind, fabric_of_bandwidths, fabric_of_size
from azureml_strategy.planning.fitted import Parameters, default_parameters
from azureml_strategy.planning.kernels import Computation, compute, kernels_of
from azureml_strategy.planning.networks import Network, named_network
from azureml_strategy.planning.steps import Distribution, StepTime, StrategyName, check_pipeline, make_step, time_step

_HALVES = ("bf16", "16")
_ADDED_BYTES = 12  # of a parameter: a batch's gradient and the sum of those before are read, and their sum is written
_SAME_PEAK = 0.01  # data sheets round
# Any machine whose step was measured: only the ratio of its two figures counts, for the shape of the step.
_MEASURED = GPU(
    name="the measured machine",
    model="measured",
    form="PCIe",
    driver="",
    peaks=MappingProxyType({"32": 0.2, "16": 0.2, "bf16": 0.2}),
    memory_gb=0,
    memory_bandwidth=20,
    multiprocessors=1,
    pcie=3,
    year=0,
    source="a desktop processor's peak and memory bandwidth",
)


@dataclass(frozen=True)
class Prediction:
    """What one optimizer step takes, and how fast that is.

    Attributes:
        samples_per_second: of all GPUs.
        low: the lower end of the range in which the rate is expected, from the errors in fitted.toml.
        high: the upper end.
        step_s: seconds of an optimizer step.
        compute_s: of it, forward, backward and optimizer.
        communication_s: of it, what communication adds.
        bubble_s: of it, what stages of a pipeline wait.
        data_s: of it, what the step waits for data.
        bound_by: what makes it as long as it is: `computation`, `memory bandwidth`, `kernel launches`, `communication`,
            `pipeline bubble` or `data`.
        efficiency: computation's share of the step: what is left of it beside communication, bubble and data.
        naive: the rate by `t = compute + 2 (p - 1) / p x gradients / bandwidth`, without overlap, for comparison.
        basis: what the computation was derived from, for a reader.
        gpus: number of GPUs.
        batch_size: samples of a GPU.
    """

    samples_per_second: float
    low: float
    high: float
    step_s: float
    compute_s: float
    communication_s: float
    bubble_s: float
    data_s: float
    bound_by: str
    efficiency: float
    naive: float
    basis: str
    gpus: int
    batch_size: float


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was measured on one GPU.

    Attributes:
        seconds: forward and backward pass of one batch of the size that is planned, and the optimizer's step, without
            communication. Accumulated batches are counted besides: measure one.
        gpu: name of the GPU, as the driver gives it or as `H100`; None for the one that is planned.
        recomputes: whether the strategy's activation checkpointing was on: then its second forward pass is in it.
    """

    seconds: float
    gpu: str | None = None
    recomputes: bool = False


def predict(
    network: Network | str,
    *,
    batch_size: float,
    gpu: str | None = None,
    vm_size: str | None = None,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    precision: str = "bf16-mixed",
    compiled: bool = False,
    strategy: Distribution | StrategyName = "ddp",
    optimizer: str = "adam",
    interconnect: NetworkKind | None = None,
    inside_gb: float | None = None,
    across_gb: float | None = None,
    library: Library = "nccl",
    measured: MeasuredStep | None = None,
    loader_rate: float | None = None,
    parameters: Parameters | None = None,
    anchored: bool = True,
) -> Prediction:
    """Predict the training rate of a network. Nothing is computed on a GPU and nothing is asked of a service.

    Args:
        network: a name that `named_network` knows, such as `resnet50`, or a description by `network_of_module` or
            `network_of_counts`.
        batch_size: samples of a step on each GPU; of a group of GPUs where they hold one copy of the network together.
        gpu: model or driver's name, such as `V100`, `A100 40GB` or `NVIDIA H100 80GB HBM3`; by default that of the
            VM size. None of both is right only with a measured step.
        vm_size: an Azure VM size, which also gives the links.
        nodes: number of nodes.
        gpus_per_node: GPUs used on each; by default all of the VM size, else 1.
        precision: Lightning's name: `32-true`, `bf16-mixed`, `16-mixed`, ..., or `tf32` for float32 on tensor cores.
        compiled: whether `torch.compile` fuses kernels.
        strategy: a name of conf/strategy with its defaults, or a `Distribution`.
        optimizer: `adam` (AdamW, too) or `sgd` with momentum.
        interconnect: what joins the nodes, `infiniband` or `ethernet`; by default the best that the size has.
        inside_gb: bus bandwidth inside a node in GB/s, in place of the size's; with `across_gb` no size is needed.
        across_gb: the same between nodes.
        library: `gloo` for processes without GPUs, as the emulator's are.
        measured: a step of one GPU, from which all computation is scaled.
        loader_rate: samples per second that the data pipeline gives each GPU at most; None for any.
        parameters: fitted numbers; by default those of fitted.toml.
        anchored: correct the roofline by measured rates of the same GPU, where there are any.

    Returns:
        The rate with its parts and its range.

    Raises:
        PlanError: a name is unknown, numbers contradict one another, or the strategy cannot run the network.
    """
    known = parameters or default_parameters()
    described = named_network(network) if isinstance(network, str) else network
    how = strategy if isinstance(strategy, Distribution) else Distribution(strategy=strategy)
    size = _size(vm_size)
    card, per_node = _gpu(gpu, size, measured), _gpus_per_node(size, gpus_per_node)
    given = {"loader_rate": loader_rate, "inside_gb": inside_gb, "across_gb": across_gb}
    given["measured.seconds"] = measured.seconds if measured else None
    present = {name: value for name, value in given.items() if value is not None}
    _check(nodes=nodes, gpus_per_node=per_node, batch_size=batch_size, **present)
    check_pipeline(how, batch_size, precision)
    joined = _joined(size, nodes, per_node, interconnect, inside_gb, across_gb, known)
    joined = replace(joined, fabric=replace(joined.fabric, library=library))
    case = _Case(precision, compiled, batch_size)
    timed = _time_computation(described, card, case, how, optimizer, measured, known, anchored)
    width = 2 if precision.startswith(_HALVES) else 4
    samples = batch_size / how.pieces
    times = timed.computation, timed.optimizer_s, timed.adding_s
    step = make_step(described, *times, joined.fabric, width, how, samples)
    found = _with_skew(time_step(step), joined)
    return _prediction(described, how, found, timed, joined, batch_size, loader_rate, known)


def _gpus_per_node(size: VMSize | None, given: int | None) -> int:
    there = size.gpus if size and size.gpus else None
    if given is None:
        return there or 1
    if there is not None and size is not None and given > there:
        raise PlanError(f"gpus_per_node is {given}, and {size.name} has {there}. Give {there} or fewer.")
    return given


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        whole = name in ("nodes", "gpus_per_node")
        if not 0 < value < math.inf or (whole and value != int(value)):
            raise PlanError(f"{name} is {value}. Give a {'whole ' if whole else ''}number above 0.")


def _size(name: str | None) -> VMSize | None:
    try:
        return lookup_vm_size(name) if name else None
    except LookupError as error:
        raise PlanError(str(error)) from error


def _gpu(name: str | None, size: VMSize | None, measured: MeasuredStep | None) -> GPU:
    if name is not None:
        return named_gpu(name)
    found = gpu_of(size) if size else None
    if found is not None:
        return found
    if measured is not None and measured.gpu is None:
        return _MEASURED
    if size is not None:
        raise PlanError(f"The GPU of {size.name} is not known. Name its model: gpu='H100', say.")
    raise PlanError("Name a GPU (gpu='H100') or a VM size (vm_size='Standard_ND96isr_H100_v5').")


def named_gpu(name: str) -> GPU:
    """The GPU of a name.

    Raises:
        PlanError: nobody knows it.
    """
    found = find_gpu(name)
    if found is None:
        raise PlanError(f"No GPU is known as {name!r}. Known: {', '.join(each.name for each in known_gpus())}.")
    return found


def _joined(
    size: VMSize | None,
    nodes: int,
    per_node: int,
    interconnect: NetworkKind | None,
    inside_gb: float | None,
    across_gb: float | None,
    known: Parameters,
) -> Joined:
    if size is None:
        if (nodes > 1 and across_gb is None) or (per_node > 1 and inside_gb is None):
            raise PlanError("Several GPUs without a VM size need their links: give inside_gb, and across_gb for nodes.")
        inside, across = inside_gb or across_gb or 1.0, across_gb or inside_gb or 1.0
        return fabric_of_bandwidths(nodes, per_node, inside, across, known, interconnect or "infiniband")
    joined = fabric_of_size(size, nodes, per_node, known, interconnect)
    given = replace(
        joined.fabric,
        inside=_replaced(joined.fabric.inside, inside_gb),
        across=_replaced(joined.fabric.across, across_gb),
    )
    return replace(joined, fabric=given)


def _replaced(tier: Tier, bandwidth_gb: float | None) -> Tier:
    return tier if bandwidth_gb is None else replace(tier, bandwidth=bandwidth_gb * 1e9)


@dataclass(frozen=True)
class _Timed:
    computation: Computation
    optimizer_s: float
    adding_s: float
    basis: str
    error: float


def _time_computation(
    network: Network,
    gpu: GPU,
    case: _Case,
    how: Distribution,
    optimizer: str,
    measured: MeasuredStep | None,
    known: Parameters,
    anchored: bool,
) -> _Timed:
    """Time forward and backward of what runs at once, and the optimizer, on one GPU: by the roofline, corrected."""
    moved = known.optimizer_bytes.get(optimizer)
    if moved is None:
        raise PlanError(f"No optimizer is known as {optimizer!r}. Known: {', '.join(known.optimizer_bytes)}.")
    untold = 1.0, "roofline", known.errors["other_gpu"]
    factor, basis, error = _corrected(network, gpu, case, known) if anchored else untold
    ratio = 1.0
    if measured is not None:
        base = gpu if measured.gpu is None else named_gpu(measured.gpu)
        own = _corrected(network, base, case, known)[0] if anchored else 1.0
        alone = _computation(network, base, case, known, own)
        again = alone.forward_s if measured.recomputes else 0.0
        ratio = measured.seconds / (alone.total_s + again + _optimizer_s(network, base, moved, known))
        basis = f"a measured step of {base.name}"
        error = known.errors["measured" if base is gpu else "same_gpu"]
    piece = replace(case, batch_size=case.batch_size / how.pieces)
    # A launch is the host's: it is as much longer than assumed on every GPU.
    computation = _computation(network, gpu, piece, known, ratio * factor, ratio)
    updated, added = (ratio * _optimizer_s(network, gpu, each, known) for each in (moved, _ADDED_BYTES))
    return _Timed(computation, updated, added, basis, error)


@dataclass(frozen=True)
class _Case:
    precision: str
    compiled: bool
    batch_size: float


def _computation(
    network: Network, gpu: GPU, case: _Case, known: Parameters, factor: float = 1.0, host_factor: float = 1.0
) -> Computation:
    kernels = kernels_of(network.operators, case.compiled)
    scale = case.batch_size / network.operators.samples
    try:
        efficiency = known.efficiency_of(gpu.model, case.precision)
        return compute(kernels, gpu, case.precision, efficiency, scale, factor, host_factor)
    except LookupError as error:
        raise PlanError(str(error)) from error


def _optimizer_s(network: Network, gpu: GPU, moved: float, known: Parameters) -> float:
    return moved * network.parameters / (known.efficiency.memory * gpu.memory_bandwidth * 1e9)


def _corrected(network: Network, gpu: GPU, case: _Case, known: Parameters) -> tuple[float, str, float]:
    """The factor of `_anchor` with what the user's own runs say of it, its source, and the relative error to expect.

    Where they were of the other mode, compiled or not, that counts, with the error of this mode added to theirs; where
    they were of other networks or batches, the error of another network on the same GPU.
    """
    factor, basis, name = _anchor(network, gpu, case, known)
    error = known.errors[name]
    own, other = (
        known.corrections.get((gpu.model, network.family, case.precision, compiled))
        for compiled in (case.compiled, not case.compiled)
    )
    beyond = known.errors["same_gpu"]
    if own is not None:
        return own.factor * factor, own.source, own.error_of(network, case.batch_size, beyond)
    if other is not None:
        mode = "eager" if case.compiled else "compiled"
        theirs = other.error_of(network, case.batch_size, beyond)
        return other.factor * factor, f"{other.source}, which were {mode}", math.hypot(theirs, error)
    return factor, basis, error


def _anchor(network: Network, gpu: GPU, case: _Case, known: Parameters) -> tuple[float, str, str]:
    """By which factor measured steps of a network of the same family on this GPU are longer than the roofline says.

    A measurement of the same mode counts first, then one of the other mode, compiled or not.
    """
    fitting = [
        (each, card)
        for each in known.anchors
        if _is_like(card := named_gpu(each.gpu), gpu)
        and each.family == network.family
        and each.precision == case.precision
    ]
    if not fitting:
        return 1.0, f"the roofline of {gpu.name}", "other_gpu"
    best, card = min(fitting, key=lambda each: (each[1].model != gpu.model, each[0].compiled != case.compiled))
    there = _Case(best.precision, best.compiled, best.batch)
    like = named_network(best.network)
    optimizer_s = _optimizer_s(like, card, known.optimizer_bytes["sgd"], known)
    alone = _computation(like, card, there, known).total_s + optimizer_s
    text = f"{best.network} at {best.samples_per_second:,.0f} samples/s on {card.name} ({best.source})"
    error = "same_gpu" if card.model == gpu.model else "other_gpu"
    return best.batch / best.samples_per_second / alone, text, error


def _is_like(card: GPU, gpu: GPU) -> bool:
    """Whether it is the same model, or one with the same peaks and other memory, as H100 and H200."""
    alike = abs(card.peaks["32"] / gpu.peaks["32"] - 1) < _SAME_PEAK and card.multiprocessors == gpu.multiprocessors
    return card.model == gpu.model or (alike and card.peaks.keys() == gpu.peaks.keys())


def _with_skew(step: StepTime, joined: Joined) -> StepTime:
    """Add what a step of several GPUs waits for the slowest: the expected largest of p normal deviates."""
    if joined.fabric.size == 1:
        return step
    waits = joined.skew * math.sqrt(2 * math.log(joined.fabric.size)) * step.compute_s
    return replace(step, communication_s=step.communication_s + waits + joined.overhead_s)


def _prediction(
    network: Network,
    how: Distribution,
    step: StepTime,
    timed: _Timed,
    joined: Joined,
    batch_size: float,
    loader_rate: float | None,
    known: Parameters,
) -> Prediction:
    size = joined.fabric.size
    samples = batch_size * how.accumulate * size / how.model_parallel_size
    needed_s = batch_size * how.accumulate / loader_rate if loader_rate else 0.0
    data_s = max(needed_s - step.total_s, 0.0)
    total_s = step.total_s + data_s
    rate = samples / total_s
    kind = "ethernet" if joined.fabric.nodes > 1 and joined.fabric.across.name.lower() == "ethernet" else "infiniband"
    exchange_error = known.errors[kind] if joined.error is None else joined.error
    parts = (timed.error * step.compute_s, exchange_error * step.communication_s)
    spread = math.hypot(*parts) / total_s
    return Prediction(
        samples_per_second=rate,
        low=rate / (1 + spread),
        high=rate * (1 + spread),
        step_s=total_s,
        compute_s=step.compute_s,
        communication_s=step.communication_s,
        bubble_s=step.bubble_s,
        data_s=data_s,
        bound_by=_bound_by(step, data_s, timed.computation),
        efficiency=step.compute_s / total_s,
        naive=samples / _naive_s(network, step, joined.fabric),
        basis=timed.basis,
        gpus=size,
        batch_size=batch_size,
    )


def _bound_by(step: StepTime, data_s: float, computation: Computation) -> str:
    waits = {"data": data_s, "communication": step.communication_s, "pipeline bubble": step.bubble_s}
    longest = max(waits, key=lambda name: waits[name])
    if waits[longest] > step.compute_s:
        return longest
    if computation.is_launch_bound:
        return "kernel launches"
    return "memory bandwidth" if 2 * computation.memory_s > computation.device_s.sum() else "computation"


def _naive_s(network: Network, step: StepTime, fabric: Fabric) -> float:
    exchanged = 2 * (fabric.size - 1) / fabric.size * 4 * network.parameters / fabric.slowest.bandwidth
    return step.compute_s + exchanged
