"""Equal gradients under DDP in a user's own loop, whatever its passes go through and whatever trains."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from azureml_strategy.strategies.changing_parameters import (
    CompletingDDP,
    average,
    follow_backward_passes,
    for_each_parameter,
    optimized,
)


class _ReducerPasses:
    """Tracks whether the reducer of a wrapper averages in a backward pass: once after each forward pass.

    Args:
        ddp: around a module.
        in_backward: whether a backward pass of the strategy runs. Such a pass completes by itself.

    Attributes:
        ddp: a weak reference to it.
        awaits: whether the reducer expects a backward pass after a forward pass.
        averages: whether the reducer has averaged in the last backward pass.
        reduced: ids of the parameters whose gradients the reducer averages.
        left: ids of the parameters that the user has told DDP to ignore.
    """

    def __init__(self, ddp: CompletingDDP, in_backward: Callable[[], bool]) -> None:
        self.ddp, self._in_backward = weakref.ref(ddp), in_backward
        self.awaits = self.averages = False
        self.reduced = {id(each) for each in ddp.reduced}
        ignored = set(ddp.parameters_to_ignore)
        self.left = {id(each) for name, each in ddp.module.named_parameters() if name in ignored}
        ddp.register_forward_hook(self._expect_backward)

    def _expect_backward(self, ddp: nn.Module, inputs: object, outputs: Any) -> None:
        assert isinstance(ddp, CompletingDDP)

        def watch(output: Tensor) -> Tensor:
            if output.requires_grad:
                self.awaits = True
                output.register_hook(self._on_backward)  # type: ignore[no-untyped-call]
            return output

        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self.awaits, ddp.awaits_backward = False, True
            apply_to_collection(outputs, Tensor, watch)
            if not self.awaits:  # no output needs one: the forward pass has gone backward itself
                ddp.expect_nothing()

    def _on_backward(self, _: Tensor) -> None:
        ddp = self.ddp()
        if self.awaits and ddp is not None:
            self.awaits, self.averages = False, True
            if not self._in_backward():  # loss.backward() of the user's
                ddp.complete_pass()


class LoopGradients:
    """Averages the gradients that no reducer of DDP averages.

    A reducer averages in the first backward pass after a forward pass of its module, and only the parameters that were
    trainable when it was made. A loop may call layers without the wrapper, go backward twice, unfreeze parameters,
    train some that no module has, and go backward by `loss.backward()`. Gradients that are equal already may be
    averaged again: that changes nothing.
    """

    def __init__(self) -> None:
        self._passes: list[_ReducerPasses] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []  # in the same order on all ranks
        self._in_backward = False
        self._backwards = 0  # how many backward passes have averaged
        # The same number at each optimizer's last step.
        self._backwards_at_step: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        _followed_loops().append(weakref.ref(self))

    def add_module(self, ddp: CompletingDDP) -> None:
        """Average the gradients of a module."""
        self._passes = [each for each in self._passes if each.ddp() is not None]
        self._passes.append(_ReducerPasses(ddp, lambda: self._in_backward))

    def add_optimizer(self, optimizer: Optimizer, device: torch.device) -> None:
        """Average the gradients of an optimizer's parameters; a collective if some are in no module.

        Args:
            optimizer: may get groups later.
            device: of this rank. Parameters on another one belong to a module that is not moved and made equal yet.
        """
        self._optimizers = [each for each in self._optimizers if each() is not None]
        self._optimizers.append(weakref.ref(optimizer))

        def unknown(of: Optimizer) -> list[nn.Parameter]:
            known = {id(each) for passes in self._passes if (ddp := passes.ddp()) for each in ddp.equal}
            return [each for each in optimized([of]) if id(each) not in known and each.device.type == device.type]

        for_each_parameter(optimizer, unknown, lambda each: dist.broadcast(each.detach(), 0))

    @contextmanager
    def backward_pass(self, loss: Tensor) -> Iterator[None]:
        """Go backward from a loss in this context; at its end, average the gradients that no reducer has averaged."""
        self._in_backward = True
        for each in self._passes:
            each.averages = False
            if (ddp := each.ddp()) is not None:
                ddp.complete_after(loss)
        try:
            yield
        finally:
            self._in_backward = False
        self._average_left()

    def _average_left(self) -> None:
        self._backwards += 1
        self._average_others(self._living_optimizers())

    def follow_own_backward(self) -> Callable[[], None]:
        """Note the gradients before a `loss.backward()` of the user's.

        Returns:
            A function to call after the pass. It averages if a gradient of this loop has changed. If none has, the pass
            was through something else, perhaps on one rank alone.
        """
        if self._in_backward:  # a pass of the strategy
            return lambda: None
        parameters = optimized(self._living_optimizers())
        noted = [(each, each.grad, _version(each.grad)) for each in parameters]
        earlier = [(each, each.averages) for each in self._passes]
        for each in self._passes:
            each.averages = False

        def average_new() -> None:
            # The gradient is another tensor, or its values have changed.
            changed = any(each.grad is not before or _version(each.grad) != version for each, before, version in noted)
            if changed:
                self._average_left()
            for each, averaged in earlier:
                each.averages = averaged and not changed

        return average_new

    def before_step(self, optimizer: Optimizer) -> None:
        """Average the gradients before a step, if no backward pass has done so since the optimizer's last one."""
        if self._backwards_at_step.get(optimizer, 0) == self._backwards:
            self._average_others([optimizer])
            for each in self._passes:
                each.averages = False
        self._backwards_at_step[optimizer] = self._backwards

    def closure_of(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure after which gradients are equal. LBFGS decides by the loss: it gets the ranks' mean."""

        def closed() -> Any:
            loss = closure()
            self.before_step(optimizer)
            if not isinstance(optimizer, LBFGS) or not isinstance(loss, Tensor):
                return loss
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            return mean / dist.get_world_size()

        return closed

    def _living_optimizers(self) -> list[Optimizer]:
        return [each for ref in self._optimizers if (each := ref()) is not None]

    def _average_others(self, optimizers: list[Optimizer]) -> None:
        living = [(each, ddp) for each in self._passes if (ddp := each.ddp()) is not None]
        if not living or not any(ddp.require_backward_grad_sync for _, ddp in living):
            return
        done = [each.reduced for each, ddp in living if each.averages or not ddp.require_backward_grad_sync]
        without = set().union(*done, *(each.left for each, _ in living))
        average((each for each in optimized(optimizers) if id(each) not in without), living[0][1])


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


@cache
def _followed_loops() -> list[weakref.ref[LoopGradients]]:
    """Average after each `loss.backward()` from now on, as a user's own loop calls nothing else of ours.

    Returns:
        The loops whose gradients are averaged, in the same order on all ranks.
    """
    loops: list[weakref.ref[LoopGradients]] = []

    def begin() -> Callable[[], None]:
        ends = [loop.follow_own_backward() for each in loops if (loop := each()) is not None]

        def average_all() -> None:
            for end in ends:
                end()

        return average_all

    follow_backward_passes(begin)
    return loops
