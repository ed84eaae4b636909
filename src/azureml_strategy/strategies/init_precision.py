"""Computes tables of constructors in float32 under `bf16-true` and `16-true`, where Lightning has torch make 16 bits.

Lightning makes 16 bits torch's default type while `configure_model` runs. A table of positions or frequencies is then
wrong before anything can keep it: bfloat16 has no 4,001. Here the default stays float32, and what Lightning would have
made in 16 bits is cast: a parameter as soon as its layer has it, so that no model is ever whole in float32; buffers
and other tensors when the module is converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from numpy import generic, ndarray
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from azureml_strategy.huggingface.transformers_internals import float32_by_default, reads_weights

# What makes a result float32 by itself, and not by torch's default type.
_CHOSEN = (torch.float32, torch.float64)
_BY_NAME = {"float", "double"}
# Where a module may keep tensors that it has not registered.
_CONTAINERS = (list, tuple, dict)
_OF_MODULE = {"_parameters", "_buffers", "_modules"}
# Tensors that are float32 only because torch's default type was.
_by_default = WeakTensorKeyDictionary()


@contextmanager
def float32_tables(dtype: torch.dtype) -> Iterator[None]:
    """Build modules whose parameters become 16 bits at once, and whose tables are computed in float32.

    Args:
        dtype: of the parameters.
    """
    hook = register_module_parameter_registration_hook(partial(_cast_parameter, dtype))
    try:
        with float32_by_default(), _NotesDefaults(dtype):
            yield
    finally:
        hook.remove()


def cast_plain_tensors(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Cast tensors of modules that are no buffers and that Lightning would have made in 16 bits.

    Args:
        module: that `float32_tables` was active for.
        dtype: which they get.

    Yields:
        The name of each in the module, and its values before.
    """
    for path, owner in module.named_modules() if _by_default else ():
        for name, value in list(vars(owner).items()):
            may_hold = isinstance(value, Tensor) or (type(value) in _CONTAINERS and name not in _OF_MODULE)
            found = [each for each in tree_leaves(value) if _is_default(each)] if may_hold else []
            if found:
                setattr(owner, name, tree_map_only(Tensor, partial(_cast_default, dtype), value))
                yield from ((f"{path}.{name}".lstrip("."), each) for each in found)


class _NotesDefaults(TorchFunctionMode):
    """Notes which tensors would be 16 bits if that was torch's default type.

    A layer that a constructor tries on such a tensor has parameters in 16 bits already. The tensor is cast then.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    @override
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError):
            types_given = {each.dtype for each in given if isinstance(each, Tensor)}
            if not any(_is_default(each) for each in given) or self._dtype not in types_given:
                raise
            args, kwargs = tree_map_only(Tensor, partial(_cast_default, self._dtype), (args, kwargs))
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") not in _BY_NAME and not any(_chooses(each) for each in given):
            known = {id(each) for each in given}
            for each in tree_leaves(result):
                if type(each) is Tensor and each.dtype is torch.float32 and id(each) not in known:
                    _by_default[each] = True
        return result


def _cast_parameter(dtype: torch.dtype, _: nn.Module, __: str, parameter: nn.Parameter | None) -> None:
    # Weights that transformers reads from files it casts itself, but for those that it keeps in float32.
    if type(parameter) is nn.Parameter and parameter.dtype is torch.float32 and not reads_weights():
        parameter.data = parameter.data.to(dtype)


def _chooses(given: Any) -> bool:
    """Whether an argument makes a result float32, whatever torch's default type is."""
    if isinstance(given, Tensor):
        return given.dtype in _CHOSEN and not _is_default(given)
    return isinstance(given, (ndarray, generic)) or given in _CHOSEN


def _is_default(given: Any) -> bool:
    return isinstance(given, Tensor) and given in _by_default


def _cast_default(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if _is_default(tensor) else tensor
