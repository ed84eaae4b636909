"""DDP over parameters that change: frozen, unfrozen or added later, or left out by a step."""

from __future__ import annotations

import copyreg
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# Steps for which a wrapper is kept after its last one. Two networks that train in turn come back to theirs at once.
_KEPT_STEPS = 16
# And how many are kept at most, the last used: each has memory for the gradients of what it averages.
_KEPT_SETS = 4
_MISSING = re.compile(r"indices which did not receive grad for rank \d+\s*:([^\n]*)")


class CompletingDDP(DistributedDataParallel):
    """DDP whose backward pass averages all gradients, although it has not reached all parameters.

    torch's reducer waits for a gradient of each parameter that was trainable when it was made. If one is missing, it
    leaves gradients as they are on each rank, and the next step raises an error. Here the parameters that are missing
    at the end of a backward pass are told to the reducer as ready, with what they have accumulated before. It takes no
    search through the graph before the pass, as `find_unused_parameters` does. The ranks agree after each pass on which
    parameters any of them has used; only a rank that has left some out waits for it.

    Args:
        arguments: of `DistributedDataParallel`.

    Attributes:
        reduced: the parameters whose gradients it averages, in the reducer's order.
        equal: the parameters of which all ranks have got the first one's values.
        has_reduced: whether there was a backward pass.
        awaits_backward: whether the reducer expects a backward pass that has not come yet; set by the caller of the
            forward pass.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.reduced: list[nn.Parameter] = self._build_params_for_reducer()[0]  # type: ignore[no-untyped-call]
        self.equal: list[nn.Parameter] = list(self.module.parameters())
        self.has_reduced = self.awaits_backward = False
        self._all_used: Tensor | None = None

    def complete_after(self, loss: Tensor) -> None:
        """Have the backward pass of this loss end complete."""
        self.has_reduced = True
        if loss.requires_grad:
            loss.register_hook(lambda _: self.complete_pass())  # type: ignore[no-untyped-call]

    def complete_pass(self) -> None:
        """Have the backward pass that runs now end complete; once for each pass."""
        if not self.require_backward_grad_sync:
            return
        if self.static_graph:
            self.awaits_backward = False
            return
        # The engine runs these callbacks at the end of the pass, in the order in which they were queued. The reducer
        # queues its own while the pass runs, so that it comes before the second one.
        _at_end_of_pass(lambda: _at_end_of_pass(self._complete))

    def _complete(self) -> None:
        if not self.awaits_backward:
            return
        self.awaits_backward = False
        reducer: Any = self.reducer
        missing = _missing(reducer)
        without = [index for index in missing if self.reduced[index].grad is None]
        for index in missing:
            reducer._autograd_hook(index)
        # With find_unused_parameters the reducer does so itself; with `join`, ranks that have ended take no part.
        if not (self.find_unused_parameters or self._join_config.enable):
            _at_end_of_pass(lambda: self._leave_unused(without))

    def _leave_unused(self, without: list[int]) -> None:
        """Remove the zero gradients of parameters that no rank has used, so that an optimizer passes over them.

        A parameter with a gradient of zeros would still move by momentum and decay. The ranks must agree on it, as a
        parameter that another rank has used may have a gradient of zeros too.

        Args:
            without: the indices of the parameters that had no gradient on this rank.
        """
        if self._all_used is None:
            self._all_used = torch.ones(len(self.reduced), dtype=torch.int32, device=self.reduced[0].device)
        if not without:
            if self.process_group.size() > 1:
                # It stays what it is. Only ranks that have left some out read theirs.
                dist.all_reduce(self._all_used, dist.ReduceOp.MAX, group=self.process_group, async_op=True)
            return
        used = self._all_used.clone()
        used[without] = 0
        if self.process_group.size() > 1:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self.process_group)
        of_all = used.tolist()
        for index in without:
            if not of_all[index]:
                self.reduced[index].grad = None

    def hand_over(self) -> None:
        """Leave gradients to another wrapper."""
        if self.awaits_backward:  # a step without a loss, which Lightning allows on one rank
            self.expect_nothing()

    def expect_nothing(self) -> None:
        """Tell the reducer that no backward pass comes of the last forward pass."""
        self.reducer._reset_state()
        self.awaits_backward = False

    def release(self) -> None:
        """Take the reducer's hooks off the parameters.

        Without this they would end with the last reference to DDP, and as long as a callback holds one, each gradient
        would be sent once more.
        """
        del self.reducer, self.logger


@dataclass
class _Kept:
    """A wrapper, and the step of its last use."""

    ddp: CompletingDDP
    step: int


class Wrappers:
    """DDP around a module, one for each set of parameters that trains.

    torch's reducer knows only the parameters that were trainable when it was made, and leaves the others to each rank.
    So another set has a wrapper of its own, made when the set first trains. Gradients that have been accumulated go on
    in the next wrapper's memory: a reducer copies what it does not find in its own.

    Args:
        first: around the module, just made.
        wrap: makes another one; told whether ranks may have unequal parameters, which the first rank then gives all.
    """

    def __init__(self, first: CompletingDDP, wrap: Callable[[bool], CompletingDDP]) -> None:
        self._module: nn.Module = first.module
        self._wrap = wrap
        self._parameters = list(self._module.parameters())
        self._equal = {id(each) for each in self._parameters}  # those that all ranks have alike
        self._key = self._trained()
        self._kept = {self._key: _Kept(first, 0)}
        self._step = 0
        self._seen: tuple[list[bool], list[int]] | None = None

    @property
    def current(self) -> CompletingDDP:
        """The wrapper of the parameters that trained when this was last asked."""
        return self._kept[self._key].ddp

    def begin_step(self, optimizers: Sequence[Optimizer]) -> bool:
        """Choose the wrapper before the forward pass, a collective if there are new parameters.

        Returns:
            Whether it is another one.
        """
        self._step += 1
        changed = self._choose(optimizers, between_steps=True)
        self._kept[self._key].step = self._step
        for key in [key for key, each in self._kept.items() if each.step < self._step - _KEPT_STEPS]:
            self._kept.pop(key).ddp.release()
        return changed

    def begin_backward(self, optimizers: Sequence[Optimizer]) -> bool:
        """Choose the wrapper before a backward pass: a step may toggle parameters.

        Returns:
            Whether it is another one.
        """
        changed = self._choose(optimizers, between_steps=False)
        self._kept[self._key].step = self._step
        return changed

    def average_others(self, optimizers: Sequence[Optimizer]) -> None:
        """Average the gradients that no reducer has averaged: of parameters frozen or unfrozen within a step."""
        ddp = self.current
        reduced = {id(each) for each in ddp.reduced}
        others = [each for each in optimized(optimizers) if id(each) not in reduced]
        average(self._not_ignored(others), ddp)

    def average_all(self, optimizers: Sequence[Optimizer]) -> None:
        """Average all gradients, whoever has done so before, which changes nothing."""
        average(self._not_ignored(list(optimized(optimizers))), self.current)

    def release(self) -> None:
        """End all wrappers."""
        for each in self._kept.values():
            each.ddp.release()
        self._kept = {}

    def _choose(self, optimizers: Sequence[Optimizer], between_steps: bool) -> bool:
        if self._signature(optimizers) == self._seen:
            return False
        self._parameters = list(self._module.parameters())
        key = self._trained()
        added = not self._equal.issuperset(key)
        # Within a step the graph holds the parameters' values, which a broadcast would change: wait for the next step.
        self._seen = None if added and not between_steps else self._signature(optimizers)
        if between_steps:
            self._equal = {id(each) for each in self._parameters} & (self._equal | {*key})
        equalize = added and between_steps
        if not key or (key == self._key and not equalize):
            return False
        self.current.hand_over()
        if equalize and key in self._kept:
            self._kept.pop(key).ddp.release()
        if key not in self._kept:
            if len(self._kept) >= _KEPT_SETS:  # the one that has not been used for longest goes
                self._kept.pop(next(key for key in self._kept if key != self._key)).ddp.release()
            self._kept[key] = _Kept(self._wrap(equalize), self._step)
        self._key = key
        self._kept[key] = self._kept.pop(key)  # the last used is the last
        return True

    def _signature(self, optimizers: Sequence[Optimizer]) -> tuple[list[bool], list[int]]:
        """Return what changes when other parameters train, without a walk through all modules.

        A new parameter that trains is in an optimizer.
        """
        return [each.requires_grad for each in self._parameters], [id(each) for each in optimized(optimizers)]

    def _trained(self) -> tuple[int, ...]:
        return tuple(id(each) for each in self._parameters if each.requires_grad)

    def _not_ignored(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Those that the user has not told DDP to ignore."""
        names = self.current.parameters_to_ignore
        if not parameters or not names:
            return parameters
        ignored = {id(each) for name, each in self._module.named_parameters() if name in names}
        return [each for each in parameters if id(each) not in ignored]


def average(parameters: Iterable[nn.Parameter], ddp: DistributedDataParallel) -> None:
    """Average the gradients of parameters over the ranks of a wrapper; a collective unless there are none.

    Ranks may have gone through different layers. They agree first on which parameters any of them has a gradient of;
    a rank without one gives zeros.

    Args:
        parameters: the same on all ranks, in the same order.
        ddp: the wrapper.
    """
    shared, group = list(parameters), ddp.process_group
    if not shared or group.size() == 1:
        return
    used = torch.tensor([each.grad is not None for each in shared], dtype=torch.int32)
    used = used.to(shared[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    for parameter in itertools.compress(shared, used.tolist()):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad.div_(group.size())


@contextmanager
def after_each_backward(call: Callable[[], None]) -> Iterator[None]:
    """Call a function at the end of each backward pass in this context, a plain `loss.backward()` too."""
    end = follow_backward_passes(lambda: call)
    try:
        yield
    finally:
        end()


def follow_backward_passes(begin: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Follow each backward pass from now on, a plain `loss.backward()` too, but not those within one.

    Args:
        begin: called before a pass; what it returns is called after it, unless the pass ends in an error.

    Returns:
        What ends this. Whoever began later must have ended before.
    """
    backward, runs = torch.autograd.backward, False

    @wraps(backward)
    def followed(*args: Any, **kwargs: Any) -> None:
        nonlocal runs
        if runs:  # a pass within a pass, as activation checkpoints have
            backward(*args, **kwargs)
            return
        end = begin()
        runs = True
        try:
            backward(*args, **kwargs)
        finally:
            runs = False
        end()

    def as_before() -> None:
        torch.autograd.backward = backward

    torch.autograd.backward = followed
    return as_before


def optimized(optimizers: Iterable[Optimizer]) -> Iterator[nn.Parameter]:
    """Go through the parameters of optimizers."""
    return (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])


def _at_end_of_pass(function: Callable[[], None]) -> None:
    variable: Any = Variable
    variable._execution_engine.queue_callback(function)


def _missing(reducer: Any) -> list[int]:
    """Return the indices of the parameters that a reducer still waits for. torch has them only in an error message."""
    try:
        reducer._check_reducer_finalized()
    except RuntimeError as error:
        found = _MISSING.search(str(error))
        if found is None:
            raise
        return [int(each) for each in re.findall(r"\d+", found.group(1))]
    return []


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
