"""DDP over parameters that change: they are frozen, unfrozen or added later, or a step leaves them out."""

from __future__ import annotations

import copyreg
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

# A wrapper is kept for so many steps after its last one. Two networks that train in turn come back to theirs at once.
_KEPT_STEPS = 16
# At most so many are kept, the last used ones: each has memory for the gradients that it averages.
_KEPT_SETS = 4
_MISSING = re.compile(r"indices which did not receive grad for rank \d+\s*:([^\n]*)")


class CompletingDDP(DistributedDataParallel):
    """DDP whose backward pass averages all gradients, although it has not reached all parameters.

    torch's reducer waits for a gradient of each parameter that was trainable when it was made. If one is missing, it
    leaves gradients as they are on each rank, and the next step raises an error. Here the missing parameters are
    reported to the reducer as ready at the end of the pass, with the gradients that they have accumulated before. No
    search through the graph is needed before the pass, as `find_unused_parameters` makes one. After each pass the ranks
    agree on which parameters any of them has used. Only a rank that has left some out waits for the answer.

    A single rank has nothing to average or to send. torch's DDP copies each gradient into its buckets and each buffer
    onto itself all the same: 320 kernels in a step of ResNet-50, each of which takes a GPU some microseconds. Here
    gradients and buffers of a single rank stay where they are, and no buckets are allocated, unless a hook, a static
    graph or DDP's own mixed precision needs the reducer.

    Attributes:
        reduced: the parameters whose gradients it averages, in the reducer's order.
        equal: the parameters that have the first rank's values on all ranks.
        has_reduced: whether there was a backward pass.
        awaits_backward: whether the reducer expects a backward pass that has not come yet; set by the caller of the
            forward pass.
        last_step: the step in which it was last used, once another wrapper has replaced it; see `Wrappers`.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.reduced: list[nn.Parameter] = self._build_params_for_reducer()[0]  # type: ignore[no-untyped-call]
        self.equal: list[nn.Parameter] = list(self.module.parameters())
        self.has_reduced = self.awaits_backward = False
        self.last_step = 0
        self._all_used: Tensor | None = None

    @override
    def _ddp_init_helper(
        self, parameters: list[nn.Parameter], sparse: list[bool], names: dict[int, str], static_graph: bool
    ) -> None:
        self._has_hook = vars(self).get("_has_hook", False)
        needed = self._has_hook or static_graph or self.mixed_precision is not None
        self._is_idle = self.process_group.size() == 1 and not needed
        if self._is_idle:  # the reducer must have a parameter, and has memory for the gradients of its parameters
            smallest = min(range(len(parameters)), key=lambda index: parameters[index].numel())
            parameters, sparse, names = [parameters[smallest]], [sparse[smallest]], {}
        super()._ddp_init_helper(parameters, sparse, names, static_graph)  # type: ignore[no-untyped-call]

    # Lightning, `no_sync` and users set it, and set it back.
    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward pass averages gradients."""
        return bool(vars(self).get("_asked_to_average", True)) and not vars(self).get("_is_idle", False)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._asked_to_average = value

    @override
    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self._has_hook = True  # it may change the gradients of a single rank too
        if self._is_idle:
            self.release()
            parameters, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
            names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
            self._ddp_init_helper(parameters, sparse, names, self.static_graph)
            # `no_sync` has set back what it read, which was False whatever had been asked for.
            self.require_backward_grad_sync = True
        super().register_comm_hook(state, hook)

    @override
    def will_sync_module_buffers(self) -> bool:
        several = self.process_group.size() > 1
        return several and bool(super().will_sync_module_buffers())  # type: ignore[no-untyped-call]

    def complete_after(self, loss: Tensor) -> None:
        """Average all gradients at the end of the backward pass of this loss."""
        self.has_reduced = True
        if loss.requires_grad:
            loss.register_hook(lambda _: self.complete_pass())  # type: ignore[no-untyped-call]

    def complete_pass(self) -> None:
        """Average all gradients at the end of the backward pass that runs now; call it once for each pass."""
        if not self.require_backward_grad_sync:
            return
        if self.static_graph:
            self.awaits_backward = False
            return
        # The engine runs these callbacks at the end of the pass, in the order in which they were queued. The reducer
        # queues its own while the pass runs, so it comes before the one that is queued at the end.
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
        # With find_unused_parameters the reducer does the same. With `join`, ranks that have ended would take no part.
        if not (self.find_unused_parameters or self._join_config.enable):
            _at_end_of_pass(lambda: self._leave_unused(without))

    def _leave_unused(self, without: list[int]) -> None:
        """Remove the zero gradients of parameters that no rank has used, so that an optimizer passes over them.

        A parameter with a gradient of zeros would still move by momentum and decay. The ranks must agree, because a
        parameter that another rank has used may have a gradient of zeros too.

        Args:
            without: indices of the parameters that had no gradient on this rank.
        """
        if self._all_used is None:
            self._all_used = torch.ones(len(self.reduced), dtype=torch.int32, device=self.reduced[0].device)
        if not without:
            if self.process_group.size() > 1:
                # The ones stay ones, so this rank need not wait. Only ranks that have left some out read the result.
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

    def expect_nothing(self) -> None:
        """Tell the reducer that no backward pass follows the last forward pass."""
        self.reducer._reset_state()
        self.awaits_backward = False

    def release(self) -> None:
        """Take the reducer's hooks off the parameters.

        Otherwise they stay until the last reference to DDP ends. As long as a callback holds one, each gradient would
        be sent once more.
        """
        del self.reducer, self.logger


class Wrappers:
    """DDP around a module, one for each set of parameters that trains.

    torch's reducer knows only the parameters that were trainable when it was made, and leaves the others to each rank.
    So each set has a wrapper of its own, made when the set first trains. Accumulated gradients move into the next
    wrapper's memory: a reducer copies gradients that do not lie in its own.

    Args:
        first: around the module, just made.
        wrap: makes another one. Its argument is whether ranks may have unequal parameters: then all get the first
            rank's.
    """

    def __init__(self, first: CompletingDDP, wrap: Callable[[bool], CompletingDDP]) -> None:
        self._module: nn.Module = first.module
        self._wrap = wrap
        self._parameters = list(self._module.parameters())
        self._equal = {id(each) for each in self._parameters}  # those with the same values on all ranks
        self._key = self._trained()
        self._kept = {self._key: first}  # the last used is the last
        self._step = 0
        self._known: tuple[list[bool], list[int]] | None = None

    @property
    def current(self) -> CompletingDDP:
        """The wrapper that was last chosen."""
        return self._kept[self._key]

    def begin_step(self, optimizers: Sequence[Optimizer]) -> bool:
        """Choose the wrapper before the forward pass, and return whether it is another one.

        A collective if there are new parameters.
        """
        changed = self.choose(optimizers, between_steps=True)
        self._step += 1
        for key, each in list(self._kept.items()):
            if key != self._key and each.last_step < self._step - _KEPT_STEPS:
                self._kept.pop(key).release()
        return changed

    def average(self, optimizers: Sequence[Optimizer], also_reduced: bool) -> None:
        """Average the gradients of parameters that were frozen or unfrozen within a step, which no reducer averages.

        Args:
            optimizers: of the parameters.
            also_reduced: average those of the reducer too. If it has averaged them already, they stay as they are.
        """
        ddp = self.current
        left = set[int]() if also_reduced else {id(each) for each in ddp.reduced}
        if names := ddp.parameters_to_ignore:
            left |= {id(each) for name, each in self._module.named_parameters() if name in names}
        average((each for each in optimized(optimizers) if id(each) not in left), ddp)

    def release(self) -> None:
        """End all wrappers."""
        for each in self._kept.values():
            each.release()
        self._kept = {}

    def choose(self, optimizers: Sequence[Optimizer], between_steps: bool) -> bool:
        """Choose the wrapper of the parameters that train now, and return whether it is another one.

        A step may toggle parameters, so this is called before each backward pass too, with `between_steps=False`.
        """
        if self._signature(optimizers) == self._known:
            return False
        self._parameters = list(self._module.parameters())
        key = self._trained()
        added = not self._equal.issuperset(key)
        # Within a step the graph holds the parameters' values, which a broadcast would change: wait for the next step.
        self._known = None if added and not between_steps else self._signature(optimizers)
        if between_steps:
            self._equal = {id(each) for each in self._parameters} & (self._equal | {*key})
        equalize = added and between_steps
        if not key or (key == self._key and not equalize):
            return False
        if self.current.awaits_backward:  # a step without a loss, which Lightning allows on one rank
            self.current.expect_nothing()
        self.current.last_step = self._step
        if equalize and key in self._kept:
            self._kept.pop(key).release()
        if key not in self._kept:
            if len(self._kept) >= _KEPT_SETS:  # the one that has not been used for longest goes
                self._kept.pop(next(key for key in self._kept if key != self._key)).release()
            self._kept[key] = self._wrap(equalize)
        self._key = key
        self._kept[key] = self._kept.pop(key)
        return True

    def _signature(self, optimizers: Sequence[Optimizer]) -> tuple[list[bool], list[int]]:
        """Return what changes when other parameters train, without a walk through all modules.

        A new parameter that trains is in an optimizer.
        """
        return [each.requires_grad for each in self._parameters], [id(each) for each in optimized(optimizers)]

    def _trained(self) -> tuple[int, ...]:
        return tuple(id(each) for each in self._parameters if each.requires_grad)


def average(parameters: Iterable[nn.Parameter], ddp: DistributedDataParallel) -> None:
    """Average the gradients of parameters over the ranks of a wrapper; a collective unless there are none.

    Ranks may have gone through different layers. First they agree on which parameters have a gradient on any rank. A
    rank without one gives zeros.

    Args:
        parameters: the same on all ranks, in the same order.
        ddp: whose process group is used.
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


def follow_backward_passes(begin: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Follow each backward pass from now on, a plain `loss.backward()` too, but not those within another one.

    Args:
        begin: called before a pass. It returns a function that is called after the pass, unless that raises.

    Returns:
        A function that ends this. A caller that began later must end earlier.
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
    """Return the indices of the parameters that a reducer still waits for. torch says them only in an error message."""
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
    given_class: Any = type(optimizer)

    def call_with_new() -> None:
        for each in find(optimizer):
            if each not in known:
                known.add(each)
                call(each)

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        given_class.add_param_group(self, param_group)
        call_with_new()

    def reduce_to_given_class(self: Optimizer, protocol: Any) -> Any:  # a copy and a pickle have no new class
        _, _, *state = given_class.__reduce_ex__(self, protocol)
        return (copyreg.__newobj__, (given_class,), *state)  # type: ignore[attr-defined]

    call_with_new()
    names = {name: getattr(given_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods = {"add_param_group": add_param_group, "__reduce_ex__": reduce_to_given_class}
    optimizer.__class__ = type(given_class.__name__, (given_class,), {**names, **methods})
