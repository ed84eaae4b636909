"""Traces what a module's training step holds, by units of the module, without computing it.

A step runs forward and backward on fake tensors, which have shapes and storages but no memory. They say that they are
on the CPU: so autocast and the attention kernel are those of a real step. torch's attention then takes its flash
kernel, which keeps queries, keys, values, outputs and one number a row, as the flash kernels of GPUs do (Dao et al.
2022, https://arxiv.org/abs/2205.14135). On meta tensors it would keep the matrix of scores, which grows with the square
of the length. Counted are storages, each once, as torch's allocators do.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.live_bytes import LiveBytes
from azureml_strategy.strategies.mixed_precision import MIXED, NORM_WITH_STATISTICS, float32_buffers
from azureml_strategy.strategies.model_parallel.module import HasTensorParallelPlan, sharded_blocks_of
from azureml_strategy.strategies.pipeline.partition import PipelineReady, chain_of, place_of

TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "32-true": torch.float32, "64-true": torch.float64}
PRECISIONS = (*MIXED, *TRUE)
"""Lightning's names of the precisions that can be traced."""


@dataclass(frozen=True)
class Weight:
    """A parameter; a tied one stands once, in the unit that has it first.

    Attributes:
        name: in the module.
        elements: numbers in it.
        item: bytes of a number, as the module holds it.
        trainable: whether it has a gradient.
        cut: whether the module's tensor-parallel plan cuts it.
    """

    name: str
    elements: int
    item: int
    trainable: bool
    cut: bool = False


@dataclass(frozen=True)
class Unit:
    """A part of a module that runs as one: a layer of its chain, a sharded block, or a child.

    Attributes:
        name: in the module; empty for what is in no unit.
        weights: its parameters.
        block: whether FSDP2 gathers it by itself.
        kind: of a chain's layer; empty otherwise.
        tied: bytes of a parameter that an earlier unit has, and this one uses too.
    """

    name: str
    weights: tuple[Weight, ...]
    block: bool = False
    kind: str = ""
    tied: int = 0

    @property
    def elements(self) -> int:
        """Numbers in all parameters."""
        return sum(each.elements for each in self.weights)

    @property
    def trainable(self) -> int:
        """Numbers in the parameters that train."""
        return sum(each.elements for each in self.weights if each.trainable)


@dataclass(frozen=True)
class Phase:
    """A stretch of a step, in one unit or between two. All bytes are those of the whole step, not of the unit alone.

    Attributes:
        unit: number of the unit; -1 between units.
        backward: whether it belongs to the backward pass.
        start: bytes of activations at its start.
        peak: the most bytes of activations, workspaces and gradients that are not added up yet.
        with_gradients: the most bytes together with the gradients that were added up.
        end: bytes of activations at its end.
        gradients: elements of the gradients that were added up in it.
        output: bytes of what the unit returns.
    """

    unit: int
    backward: bool
    start: int
    peak: int
    with_gradients: int
    end: int
    gradients: int
    output: int = 0


@dataclass(frozen=True)
class Footprint:
    """What a module holds, and what one step of it needs.

    Attributes:
        units: in the order of the chain.
        buffers: bytes of the module's buffers.
        watched: bytes of those that are no statistics of normalisations; `EqualBuffers` watches whether they change.
        precision: Lightning's name.
        batch: bytes of the batch.
        phases: of a step on the weights as the module holds them, under autocast in a mixed precision.
        half_phases: of a step on 16-bit weights, as DeepSpeed and FSDP2 have them in a mixed precision; otherwise the
            same as `phases`.
    """

    units: tuple[Unit, ...]
    buffers: int
    watched: int
    precision: str
    batch: int
    phases: tuple[Phase, ...]
    half_phases: tuple[Phase, ...]

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All parameters."""
        return tuple(weight for unit in self.units for weight in unit.weights)

    @property
    def elements(self) -> int:
        """Numbers in all parameters; tied ones count once."""
        return sum(unit.elements for unit in self.units)

    @property
    def trainable(self) -> int:
        """Numbers in the parameters that train."""
        return sum(unit.trainable for unit in self.units)


def footprint_of(module: nn.Module, batch: Any, precision: str = "32-true") -> Footprint:
    """Trace a step of a module.

    Args:
        module: a LightningModule, whose `training_step` is run without a Trainer, or any module that returns tensors
            for the batch. It is not changed. It may be on the meta device, and `configure_model` may not have run yet.
        batch: of one rank and one backward pass, of tensors on any device; none of their values are read.
        precision: Lightning's name, one of `PRECISIONS`.

    Raises:
        PlanError: the precision is unknown, or the step cannot run without values, such as one that branches on them.
    """
    if precision not in PRECISIONS:
        raise PlanError(
            f"precision={precision!r} is unknown to the plan of memory. Choose one of {', '.join(PRECISIONS)}."
        )
    built = _built(module)
    parts = _parts(built)
    half, mixed = MIXED.get(precision), precision in MIXED
    whole = TRUE.get(precision, torch.float32)
    phases = _traced(built, parts, batch, whole, half)
    casts = half if mixed and float32_buffers(built) else None
    half_phases = _traced(built, parts, batch, half, casts) if half is not None else phases
    buffers = sum(each.nbytes for each in built.buffers())
    norms = [each for each in built.modules() if isinstance(each, NORM_WITH_STATISTICS)]
    watched = buffers - sum(each.nbytes for norm in norms for each in norm.buffers(recurse=False))
    size = sum(each.nbytes for each in tree_leaves(batch) if isinstance(each, Tensor))
    return Footprint(_units(parts, whole.itemsize), buffers, watched, precision, size, phases, half_phases)


def _built(module: nn.Module) -> nn.Module:
    """Return a copy of the module on the meta device, with the layers that `configure_model` makes."""
    with torch.device("meta"):
        copied = copy.deepcopy(module, _sketches(module))
        if isinstance(copied, LightningModule):
            copied.configure_model()
    return copied


def _sketches(module: nn.Module) -> dict[int, Any]:
    """Return a memo for deepcopy, in which each tensor of the module has a sketch without memory."""
    memo: dict[int, Any] = {}
    for each in module.parameters():
        memo[id(each)] = nn.Parameter(each.detach().to("meta"), requires_grad=each.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return memo


@dataclass(frozen=True)
class _Part:
    name: str
    module: nn.Module
    block: bool
    kind: str
    names: dict[nn.Parameter, str]
    tied: int
    cut: frozenset[nn.Parameter]


def _parts(module: nn.Module) -> list[_Part]:
    """Return the module's parts, and last what is in none of them."""
    kinds = _kinds(module)
    blocks = set(sharded_blocks_of(module))
    names = {each: name for name, each in module.named_parameters()}
    cut = _cut_parameters(module)
    taken: set[nn.Parameter] = set()
    parts = []
    for name, kind in [*kinds.items(), ("", "")]:
        part = module.get_submodule(name)
        own = {each: names[each] for each in part.parameters() if each not in taken}
        shared = sum(each.nbytes for each in part.parameters() if each in taken) if name else 0
        taken |= own.keys()
        parts.append(_Part(name, part, part in blocks, kind, own, shared, frozenset(cut & own.keys())))
    return parts


def _kinds(module: nn.Module) -> dict[str, str]:
    """Return the names and kinds of the module's chain, else of its sharded blocks, else of its children."""
    if isinstance(module, PipelineReady) and isinstance(module, LightningModule):
        try:
            layers = chain_of(module)
        except TypeError:  # a network of an ImageClassifier that is no chain
            layers = []
        places = [(place_of(module, index, layer), layer.kind) for index, layer in enumerate(layers)]
        if places:
            return {place: kind for place, kind in places if place is not None}
    names = {each: name for name, each in module.named_modules()}
    blocks = sharded_blocks_of(module)
    return {names[each]: "" for each in blocks or module.children()}


def _cut_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that the module's tensor-parallel plan cuts; biases of rowwise layers stay whole."""
    plan = module.tensor_parallel_plan() if isinstance(module, HasTensorParallelPlan) else {}
    found = set()
    for name, layer in module.named_modules():
        styles = [style for pattern, style in plan.items() if fnmatchcase(name, pattern)]
        for own, each in layer.named_parameters(recurse=False):
            if styles and not (own == "bias" and styles[0] == "rowwise"):
                found.add(each)
    return found


def _units(parts: list[_Part], item: int) -> tuple[Unit, ...]:
    def weights(part: _Part) -> tuple[Weight, ...]:
        return tuple(
            Weight(name, each.numel(), item, each.requires_grad, each in part.cut) for each, name in part.names.items()
        )

    return tuple(Unit(each.name, weights(each), each.block, each.kind, each.tied) for each in parts)


class _Recorder:
    """Cuts a traced step into phases."""

    def __init__(self, live: LiveBytes) -> None:
        self.live = live
        self.phases: list[Phase] = []
        self._unit, self._backward = -1, False
        self._start = self._gradients = self._output = 0

    def enter(self, unit: int, backward: bool) -> None:
        """End the phase, and begin another."""
        live = self.live
        self.phases.append(
            Phase(
                *(self._unit, self._backward, self._start, live.peak, live.with_gradients, live.bytes),
                *(self._gradients, self._output),
            )
        )
        self._unit, self._backward, self._start, self._gradients, self._output = unit, backward, live.bytes, 0, 0
        live.begin()

    def before(self, unit: int, module: nn.Module, inputs: Any) -> None:
        """Begin a unit's forward pass; a hook."""
        self.enter(unit, False)

    def after(self, unit: int, module: nn.Module, inputs: Any, output: Any) -> None:
        """End it, and note where its backward pass begins; a hook."""
        tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        self._output = sum(each.nbytes for each in tensors)
        self.enter(-1, False)
        for each in tensors:
            if each.requires_grad:
                each.register_hook(lambda _: self.enter(unit, True))  # type: ignore[no-untyped-call]

    def accumulated(self, parameter: Tensor) -> None:
        """Take a gradient out of the activations; a hook."""
        assert parameter.grad is not None
        self._gradients += parameter.numel()
        parameter.grad = None
        self.live.gradients += parameter.nbytes


def _traced(
    module: nn.Module, parts: list[_Part], batch: Any, dtype: torch.dtype, cast: torch.dtype | None
) -> tuple[Phase, ...]:
    """Return the phases of a step on weights of a type.

    Args:
        module: on the meta device.
        parts: of the module.
        batch: as in `footprint_of`.
        dtype: of the weights.
        cast: type of autocast; None for no autocast.
    """
    mode, live = FakeTensorMode(allow_non_fake_inputs=True), LiveBytes()
    recorder = _Recorder(live)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of values that are not logged, without a Trainer
        stack.enter_context(mode)
        given = tree_map_only(Tensor, lambda each: _fake(each, each.dtype), batch)
        if cast is None and dtype in (torch.bfloat16, torch.float16):  # as Lightning's plugins do
            given = tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, given)
        stack.enter_context(_with_fakes(module, dtype))
        stack.enter_context(live)
        for each in (*module.parameters(), *module.buffers()):
            live.ignore(each)
        for index, part in enumerate(parts[:-1]):
            for hook in (
                part.module.register_forward_pre_hook(partial(recorder.before, index)),
                part.module.register_forward_hook(partial(recorder.after, index)),
            ):
                stack.callback(hook.remove)
        for each in module.parameters():
            if each.requires_grad:
                handle = each.register_post_accumulate_grad_hook(recorder.accumulated)  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
        _step(module, given, cast)
        recorder.enter(-1, True)
    return tuple(recorder.phases[1:])


def _step(module: nn.Module, batch: Any, cast: torch.dtype | None) -> None:
    call: Callable[..., Any] = module
    arguments: tuple[Any, ...] = batch if isinstance(batch, tuple) else (batch,)
    if isinstance(module, LightningModule):
        call, arguments = module.training_step, (batch, 0)
    try:
        with torch.autocast("cpu", cast, enabled=cast is not None):
            output = call(*arguments)
        output = output["loss"] if isinstance(output, dict) else output
        loss = sum(each.float().sum() for each in tree_leaves(output) if isinstance(each, Tensor))
        del output
        loss.backward()  # type: ignore[union-attr]
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise PlanError(
            f"The step of {type(module).__name__} cannot be traced without values: {str(error).splitlines()[0]} Give "
            "the plan a measured step, or a training_step that reads no values and needs no Trainer."
        ) from error


def _fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")


@contextmanager
def _with_fakes(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give a module on the meta device fake parameters and buffers meanwhile. Tied parameters stay tied."""
    fakes: dict[Tensor, Any] = {}
    for each in module.parameters():
        fakes[each] = nn.Parameter(_fake(each, dtype if each.is_floating_point() else each.dtype), each.requires_grad)
    for buffer in module.buffers():
        fakes[buffer] = _fake(buffer, buffer.dtype)
    tables: list[dict[str, Any]] = []
    for owner in module.modules():
        tables += [owner._parameters, owner._buffers]
    places = [(held, name, each) for held in tables for name, each in held.items() if each is not None]
    for held, name, each in places:
        held[name] = fakes[each]
    try:
        yield
    finally:
        for held, name, each in places:
            held[name] = each
