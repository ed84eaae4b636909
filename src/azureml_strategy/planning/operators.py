"""Lists the operators of a training step with their operations and elements, from a run on tensors without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from azureml_strategy.planning.fused_calls import RECURRENT, fused_calls

Kind = Literal["convolution", "product", "attention", "batch_norm", "memory"]

# What autocast computes in float32: https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to
# float32". Normalisation by layers, softmax, losses and sums are what networks have of it.
_IN_FLOAT32 = ("layer_norm", "softmax", "nll_loss", "cross_entropy", "pow", "rsqrt", "exp", "sum", "norm", "mse_loss")
# A kernel reads its input again: batch normalisation first for the statistics. By name, how often (read, written).
_PASSES = {
    "native_batch_norm": (2, 1),
    "_native_batch_norm_legit": (2, 1),
    "native_batch_norm_backward": (2, 1),
    # dx needs x and dy, and the sums for weight and bias need both again (ATen's layer_norm_kernel.cu, two kernels)
    "native_layer_norm_backward": (2, 1),
}
# They allocate, and write nothing.
_WITHOUT_WORK = ("empty", "new_empty")


@dataclass(frozen=True)
class Operator:
    """One kernel, or one call of a library that is measured as a whole.

    Attributes:
        name: as in ATen, without namespace and overload.
        kind: what bounds it.
        flops: multiplications and additions, both counted.
        reads: elements that it reads, of activations and gradients.
        writes: elements that it writes.
        weights: elements of parameters that it reads.
        in_float32: whether autocast computes it in float32.
        backward: whether it belongs to the backward pass.
        aligned: whether the sizes of a product are multiples of 8 elements, as tensor cores want them.
        inputs: numbers of the tensors that it reads; a tensor keeps its number through views.
        outputs: numbers of those that it writes.
        sizes: elements of each number in `inputs` and `outputs`.
    """

    name: str
    kind: Kind
    flops: float
    reads: float
    writes: float
    weights: float
    in_float32: bool
    backward: bool
    aligned: bool = True
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    sizes: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter: its number of elements, and after which operator it is complete."""

    name: str
    elements: int
    after: int


@dataclass(frozen=True)
class FrozenWeight:
    """A parameter that is not trained: its number of elements, and the first and the last operator that reads it."""

    name: str
    elements: int
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Operators:
    """All operators of a forward and a backward pass, in the order in which they run.

    Attributes:
        listed: the operators.
        gradients: of the trained parameters, in the order in which they are complete.
        forward_of: for each parameter, by its name, the first operator that needs it.
        backward_from: index of the first operator of the backward pass.
        samples: size of the batch for which this counts.
        frozen: parameters that are read and not trained.
    """

    listed: tuple[Operator, ...]
    gradients: tuple[Gradient, ...]
    forward_of: dict[str, int]
    backward_from: int
    samples: int
    frozen: tuple[FrozenWeight, ...] = ()

    @property
    def flops(self) -> float:
        """Operations of the whole batch, forward and backward."""
        return sum(each.flops for each in self.listed)

    @property
    def parameters(self) -> int:
        """Elements of all trained parameters."""
        return sum(each.elements for each in self.gradients)


def list_operators(module: nn.Module, step: Callable[[nn.Module], Any], samples: int) -> Operators:
    """Run a step on the meta device and list what it computes. Nothing is computed and no memory is taken.

    Args:
        module: all of its parameters and buffers are on the meta device.
        step: computes a loss, or outputs whose sum stands for one, from inputs on the meta device.
        samples: size of the batch that it computes.

    Raises:
        Exception: whatever the module's forward pass raises on tensors without numbers.
    """
    names = {id(each): name for name, each in module.named_parameters()}
    recorder = _Recorder(names)
    gradients: list[Gradient] = []
    handles = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            handles.append(
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda done: gradients.append(Gradient(names[id(done)], done.numel(), len(recorder.found) - 1))
                )
            )
    try:
        with recorder, fused_calls(recorder):
            outputs = [each for each in tree_leaves(step(module)) if isinstance(each, Tensor) and each.requires_grad]
            if not outputs:
                raise ValueError("no output depends on a parameter that trains")
            loss = outputs[0] if len(outputs) == 1 and outputs[0].dim() == 0 else sum(each.sum() for each in outputs)
            backward_from = len(recorder.found)
            recorder.backward = True
            loss.backward()  # type: ignore[union-attr]
    finally:
        for handle in handles:
            handle.remove()
        module.zero_grad(set_to_none=True)
    frozen = tuple(
        FrozenWeight(name, each.numel(), recorder.first_use[name], recorder.last_use[name])
        for name, each in module.named_parameters()
        if not each.requires_grad and name in recorder.first_use
    )
    first_use = dict(recorder.first_use)
    return Operators(tuple(recorder.found), tuple(gradients), first_use, backward_from, samples, frozen)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operator that touches memory; views do not."""

    def __init__(self, parameters: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operator] = []
        self.first_use: dict[str, int] = {}
        self.last_use: dict[str, int] = {}
        self.backward = False
        self.silent = False
        self._parameters = parameters
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []  # a storage that is freed would give its address to the next one

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if not self.silent:
            self._record(func, args, kwargs, outputs)
        return outputs

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        name = func.__name__.partition(".")[0]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        before = {self._number(each) for each in given}
        mutates = func._schema.is_mutable
        written = [each for each in made if mutates or self._number(each) not in before]
        if not written or name.startswith(_WITHOUT_WORK):
            return
        counter = flop_registry.get(func._overloadpacket)
        flops = float(counter(*args, **kwargs, out_val=outputs)) if counter else 0.0
        if name == "convolution_backward":
            flops = _convolution_backward_flops(*args)
        self.add(name, flops, given, written, products=given if counter else ())

    def add(
        self, name: str, flops: float, given: Sequence[Tensor], written: Sequence[Tensor], products: Iterable[Tensor]
    ) -> None:
        """Add an operator that reads `given` and writes `written`."""
        own = [each for each in given if self._name_of(each) is not None]
        for each in own:
            self.first_use.setdefault(str(self._name_of(each)), len(self.found))
            self.last_use[str(self._name_of(each))] = len(self.found)
        read = _largest_once([each for each in given if self._name_of(each) is None], self._number)
        again, once = _PASSES.get(name, (1, 1))
        kind = _kind_of(name)
        inputs, results = [self._number(each) for each in read], [self._number(each) for each in written]
        reads, writes = sum(map(_touched, read)), sum(map(_touched, written))
        if name == "convolution_backward":  # one kernel for the inputs, another for the weights: both read dy
            reads += _touched(given[0])
        self.found.append(
            Operator(
                name=name,
                kind=kind,
                flops=flops,
                reads=again * reads,
                writes=once * writes,
                weights=sum(map(_touched, own)),
                in_float32=kind == "memory" and any(each in name for each in _IN_FLOAT32),
                backward=self.backward,
                aligned=all(_aligned(each) for each in products if each.dim() == 2) if kind == "product" else True,
                inputs=tuple(inputs),
                outputs=tuple(results),
                sizes=tuple(map(_touched, [*read, *written])),
            )
        )

    def _name_of(self, tensor: Tensor) -> str | None:
        return self._parameters.get(id(tensor if tensor._base is None else tensor._base))

    def _number(self, tensor: Tensor) -> int:
        """The number of the memory in which a tensor lies, the same for all of its views."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = len(self._storages)
            self._kept.append(storage)
        return self._storages[key]


def _convolution_backward_flops(gradient: Tensor, inputs: Tensor, weight: Tensor, _bias: Any, *geometry: Any) -> float:
    """Operations of the gradients of inputs and weights. torch's own count takes all groups for one."""
    transposed, needed = geometry[3], geometry[-1]
    places = (inputs if transposed else gradient)[:, 0].numel()
    return 2.0 * places * weight.numel() * (bool(needed[0]) + bool(needed[1]))


def _kind_of(name: str) -> Kind:
    if "batch_norm" in name:
        return "batch_norm"
    if name.startswith(("convolution", "_convolution", "cudnn_conv")):
        return "convolution"
    if name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm") or name.removesuffix("_backward") in RECURRENT:
        return "product"
    return "attention" if "attention" in name else "memory"


def _touched(tensor: Tensor) -> int:
    """Elements that lie in memory; an expanded dimension lies there once."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 1)


def _largest_once(tensors: Sequence[Tensor], number: Callable[[Tensor], int]) -> list[Tensor]:
    """Each memory once, by the largest of its views."""
    found: dict[int, Tensor] = {}
    for each in tensors:
        key = number(each)
        if key not in found or each.numel() > found[key].numel():
            found[key] = each
    return list(found.values())


def _aligned(matrix: Tensor) -> bool:
    return all(size % 8 == 0 or size == 1 for size in matrix.shape)


def on_meta(value: Any) -> Any:
    """A copy of nested tensors on the meta device, with neither memory nor numbers."""
    return tree_map_only(Tensor, lambda each: torch.empty_like(each, device="meta"), value)
