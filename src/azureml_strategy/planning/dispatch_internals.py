"""What torch's dispatcher knows of an operation, for which torch has no public names.

`tests/test_internals.py` lists `_schema`, the signature of an operation: which arguments it writes, and which results
are new (https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/README.md#annotations).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# torch's own operations; FSDP2's copies; and the collectives of DTensors, which copy what they are given.
_COMPUTES = ("aten", "fsdp", "_c10d_functional")
# They change where a tensor's memory is, and write none; the last two return views, or what they are given.
_MOVES = frozenset(
    {
        *("aten::set_", "aten::resize_", "aten::_resize_output_", "aten::resize_as_", "aten::set_data"),
        *("fsdp::all_gather_copy_in", "_c10d_functional::wait_tensor"),
    }
)


def moves_nothing(operation: Any) -> bool:
    """Whether an operation of the dispatcher makes views, moves a tensor's memory, or is of other libraries."""
    return bool(
        operation.namespace not in _COMPUTES
        or operation.is_view
        or operation._schema.name in _MOVES
        or torch.Tag.inplace_view in operation.tags
    )


def written_tensors(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operation writes."""
    return [each for each in tree_leaves(_written(operation, args, kwargs)) if isinstance(each, Tensor)]


def makes_new(operation: Any) -> bool:
    """Whether an operation returns tensors that are none of its arguments."""
    return any(each.alias_info is None for each in operation._schema.returns)


def leaves_empty(operation: Any) -> bool:
    """Whether an operation makes a tensor without numbers, such as `empty_like`, so that it has those of another."""
    return "empty" in operation._schema.name


def returned_arguments(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation returns that writes into arguments and returns these."""
    results = [each for each in _written(operation, args, kwargs) if each is not None]
    number = len(operation._schema.returns)
    if number == 0:
        return None
    return results[0] if number == 1 else tuple(results[:number])


def _written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found = []
    for place, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return found
