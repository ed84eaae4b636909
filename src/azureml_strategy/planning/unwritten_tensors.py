"""Tensors that are never written: torch runs as it is, but large operations only make the memory of their results.

Strategies ask tensors for more than shapes: DDP's reducer and DeepSpeed read addresses, FSDP2 frees and fills storages,
optimizers read their counters. Tensors on the meta device and torch's FakeTensor have no memory, and end all three.
So tensors here are real ones on the CPU, in memory that Linux backs by nothing until somebody writes (mmap(2),
MAP_ANONYMOUS: "its contents are initialized to zero"). A large operation writes nothing: the shapes of its results come
from its counterpart on the meta device. So a model of 28 GB takes addresses, and next to no memory.

Small operations and those on integers run as ever: counters of steps, norms, orders of samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from azureml_strategy.planning.dispatch_internals import (
    makes_new,
    moves_nothing,
    returned_arguments,
    written_tensors,
)

_MAPPED_BYTES = 65536
MALLOC_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(_MAPPED_BYTES)}
"""For glibc (mallopt(3)): memory of this many bytes and more is mapped anew each time, and so is zero and unbacked."""

# Numbers in the largest tensor of an operation that is computed.
_SMALL = 4096
# The same where all hold integers, which say what others mean: orders of samples, places of tokens.
_SMALL_INTEGERS = 1 << 22


class UnwrittenTensors(TorchDispatchMode):
    """While this is entered, large operations make unwritten results, and write nothing in place."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, nn.Parameter, nn.Buffer, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor asks again for what is in it
        if FakeTensor in types or moves_nothing(func):  # DTensors find the layouts of results with FakeTensors
            return func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(each.device.type == "meta" for each in given) or str(kwargs.get("device")) == "meta":
            return func(*args, **kwargs)
        is_small = _are_small(given)
        if not makes_new(func):
            if is_small or not written_tensors(func, args, kwargs):
                return func(*args, **kwargs)
            return returned_arguments(func, args, kwargs)
        try:
            shapes = func(*_on_meta(args), **_on_meta(kwargs))
        except (NotImplementedError, RuntimeError):  # it has no counterpart there, or asks for values
            return func(*args, **kwargs)
        if is_small and _are_small([each for each in tree_leaves(shapes) if isinstance(each, Tensor)]):
            return func(*args, **kwargs)
        return tree_map_only(Tensor, _unwritten, shapes)


def _are_small(tensors: list[Tensor]) -> bool:
    """Whether an operation on these is computed."""
    largest = max((each.numel() for each in tensors), default=0)
    are_integers = not any(each.is_floating_point() or each.is_complex() for each in tensors)
    return largest <= (_SMALL_INTEGERS if are_integers else _SMALL)


def _on_meta(arguments: Any) -> Any:
    """Return arguments of an operation with their counterparts on the meta device."""
    arguments = tree_map_only(Tensor, _sketch, arguments)
    if isinstance(arguments, dict):
        if "device" in arguments:
            arguments["device"] = torch.device("meta")
        arguments.pop("generator", None)
    return arguments


def _sketch(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _unwritten(shape: Tensor) -> Tensor:
    made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cpu")
    # The allocator reuses smaller memory, and somebody's numbers would be in it.
    return made.zero_() if made.untyped_storage().nbytes() < _MAPPED_BYTES else made
