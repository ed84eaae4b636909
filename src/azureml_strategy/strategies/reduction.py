"""Reduces a tensor over ranks: true means of integers, and sums that neither overflow nor lose digits.

Lightning's own reduction averages integers in integers and cuts off: the mean of 4 and 3 is 3. `self.log` divides by
that mean of the ranks' batch sizes, so that a value of 1.0 becomes 1.1667. Sums of int8 overflow at 127, those of
float16 at 65,504, and bfloat16 counts to 256.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

# Operations whose result may be larger than what goes in. torch gives them int64 for all integers, too.
_GROWING = (ReduceOp.SUM, ReduceOp.PRODUCT)
# The integers that both gloo and NCCL reduce.
_SENT = (torch.uint8, torch.int8, torch.int32, torch.int64)


def reduce_over_ranks(tensor: Tensor, group: Any = None, reduce_op: Any = "mean", alike: int = 1) -> Tensor:
    """Reduce a tensor over the ranks of a group, in place as far as its type can hold the result.

    Floating-point numbers keep their type; those of 16 bits and fewer are reduced in float32 and rounded once. The sum
    or product of integers or booleans is int64, as in torch. Their mean is float32, or float64 if that is torch's
    default, and the given tensor is left as it is.

    Args:
        tensor: of the same shape and type on all ranks of the group.
        group: all ranks if None.
        reduce_op: `mean` or `avg`, `sum`, `min`, `max`, `product`, or an operation of torch.distributed. None is `sum`.
        alike: how many ranks give the same values, of which `sum` counts one.

    Returns:
        The given tensor, if its type can hold the result.
    """
    operation, averages = _operation(reduce_op)
    whole_numbers = not (tensor.is_floating_point() or tensor.is_complex())
    kept = averages and whole_numbers
    wide = tensor.to(_wide_type(tensor.dtype, operation), copy=kept)
    size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if size > 1:
        dist.all_reduce(wide, op=operation, group=group)
    size = max(size, 1)  # -1 on a rank outside of the group
    if kept:
        # A model in 16 bits makes them torch's default type while its steps run.
        default = torch.get_default_dtype()
        return (wide.double() / size).to(default if default.itemsize >= 4 else torch.float32)
    if averages or alike > 1:
        wide.div_(size if averages else alike, rounding_mode="floor" if whole_numbers else None)
    if wide is tensor:
        return tensor
    tensor.detach().copy_(wide)
    return wide if whole_numbers and operation in _GROWING else tensor


def _operation(reduce_op: Any) -> tuple[Any, bool]:
    """Return the operation of torch.distributed, and whether to divide its result by the number of ranks."""
    if isinstance(reduce_op, str):
        name = reduce_op.upper()
        averages = name in ("MEAN", "AVG")
        return ReduceOp.SUM if averages else getattr(ReduceOp, name), averages
    if reduce_op is None or reduce_op == ReduceOp.AVG:  # gloo has no AVG
        return ReduceOp.SUM, reduce_op is not None
    return reduce_op, False


def _wide_type(dtype: torch.dtype, operation: Any) -> torch.dtype:
    """Return the type to reduce in."""
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else dtype
    if dtype.is_complex:
        return dtype
    return torch.int64 if operation in _GROWING or dtype not in _SENT else dtype
