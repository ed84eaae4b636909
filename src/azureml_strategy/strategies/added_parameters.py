"""Finds the parameters that an optimizer gets after the start."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer


def for_each_parameter(
    optimizer: Optimizer, find: Callable[[Optimizer], Iterable[nn.Parameter]], call: Callable[[nn.Parameter], None]
) -> None:
    """Call a function once with each parameter of an optimizer, with those of later groups when they are added.

    Args:
        optimizer: gets a class of its own, as Lightning's wrappers call the method of the class.
        find: the parameters of an optimizer that are of interest.
        call: is called in the same order on all ranks.
    """
    known: set[nn.Parameter] = set()
    own: Any = type(optimizer)

    def call_with_new() -> None:
        for each in find(optimizer):
            if each not in known:
                known.add(each)
                call(each)

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        own.add_param_group(self, param_group)
        call_with_new()

    def reduce_to_own_class(self: Optimizer, protocol: Any) -> Any:  # of a copy, or in a file
        _, _, *state = own.__reduce_ex__(self, protocol)
        return (copyreg.__newobj__, (own,), *state)  # type: ignore[attr-defined]

    call_with_new()
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    methods = {"add_param_group": add_param_group, "__reduce_ex__": reduce_to_own_class}
    optimizer.__class__ = type(own.__name__, (own,), {**names, **methods})
