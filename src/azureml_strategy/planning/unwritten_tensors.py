"""Tensors that are never written: torch runs as it is, but large operations only make the memory of their results.

Strategies ask tensors for more than shapes: DDP's reducer and DeepSpeed read addresses, FSDP2 frees and fills storages,
optimizers read their counters. Tensors on the meta device and torch's FakeTensor have no memory, and end all three.
So tensors here are real ones on the CPU, in memory that Linux backs by nothing until somebody writes (madvise(2),
MADV_DONTNEED: "zero-fill-on-demand pages for anonymous private mappings"). A large operation writes nothing: the shapes
of its results come from its counterpart on the meta device. So a model of 28 GB takes addresses, and little memory.

Small operations and those on integers run as ever: counters of steps, norms, orders of samples.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from azureml_strategy.planning.dispatch_internals import (
    leaves_empty,
    makes_new,
    moves_nothing,
    returned_arguments,
    written_tensors,
)

# Smaller memory is filled with zeros: emptying it would take longer.
_EMPTIED_BYTES = 1 << 16
_DONT_NEED = 4  # MADV_DONTNEED of Linux
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
# Numbers in the largest tensor of an operation that is computed.
_SMALL = 4096
# The same where all hold integers, which say what others mean: orders of samples, places of tokens.
_SMALL_INTEGERS = 1 << 22


_Mode: Any = TorchDispatchMode  # it has no annotations


class UnwrittenTensors(_Mode):  # type: ignore[misc]
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
        if (
            is_small
            and not leaves_empty(func)
            and _are_small([each for each in tree_leaves(shapes) if isinstance(each, Tensor)])
        ):
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
    if not isinstance(made, FakeTensor):  # nor has the result of a layout that a DTensor looks for memory
        _empty(made)
    return made


def _empty(tensor: Tensor) -> None:
    """Make a tensor's memory zero, and give its pages back to the system, which makes them anew if they are read.

    The allocator's memory may have been used before, and hold somebody's numbers.
    """
    size, start = tensor.untyped_storage().nbytes(), tensor.untyped_storage().data_ptr()
    if size < _EMPTIED_BYTES or _libc is None:
        tensor.zero_()
        return
    first, end = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
    ctypes.memset(start, 0, first - start)
    ctypes.memset(end, 0, start + size - end)
    if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _DONT_NEED):
        tensor.zero_()
