"""Times forward and backward passes of a copy of the user's module on all ranks.

They run in a process group that ends on all ranks when a trial fails on one.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _abort_process_group
from torch.nn import SyncBatchNorm

from azureml_strategy.checkpoint.random_state import random_state, set_random_state
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.channel import within
from azureml_strategy.control.gather import Exchange, GroupExchange, StoreExchange, open_shared_store
from azureml_strategy.strategies.changing_parameters import CompletingDDP
from azureml_strategy.strategies.tuning.search import Settings

Value = TypeVar("Value")
# Seconds between two looks at whether a trial has failed on another rank. Only NCCL needs them.
_LOOK_S = 0.5
# An abort waits for nobody.
_ABORT_S = 10.0
# How long a rank whose trial has failed waits for the others. They never come if training_step calls a collective
# outside of this group, in which they wait for this rank.
_OTHERS_S = 60.0
# The first line of an error of CUDA's allocator is a paragraph.
_LONGEST_FAULT = 300

# DDP sorts its buckets anew after its first step, and the second one allocates them.
_WARMUP_STEPS = 2
# PowerSGD's first steps are exact, two at least, and the third allocates its factors.
POWERSGD_EXACT_STEPS = 2
Wrap = Callable[[LightningModule, Settings, ProcessGroup], CompletingDDP]
Forward = Callable[[CompletingDDP, LightningModule, tuple[Any, ...], dict[str, Any]], Any]


class TrialError(Exception):
    """A trial failed on some rank; raised on all. The message says why and where: `(OSError: why) on rank 3`."""


class TrialGroup:
    """A process group beside that of the training, for work that may fail on one rank while others communicate.

    A rank that fails leaves this group. With gloo its connections close, so that the collectives of the others fail
    too. NCCL's would wait: so the rank writes into the rendezvous store, and the others look there and abort their
    group. The group of the training is not touched. Making one is a collective.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._store = open_shared_store(type(self).__name__, rank, world_size, None).store
        self._exchange: Exchange = StoreExchange(self._store) if self._store is not None else GroupExchange(rank)
        self._is_nccl = dist.get_backend() == "nccl"
        self.group: dist.ProcessGroup | None = dist.new_group()
        if self._store is not None and self._is_nccl:
            self._store.channel.every(_LOOK_S, self._abort_if_failed)

    def together(self, trial: Callable[[], Value], forget: Callable[[], None]) -> list[Value]:
        """Run a trial on all ranks, and return all their results in the order of ranks.

        Args:
            trial: may fail, and uses only collectives of this group.
            forget: drops the objects that hold this group, such as DDP, before it ends.

        Raises:
            TrialError: it failed on some rank.
            RuntimeError: it failed here, and the other ranks are in another collective.
        """
        found, fault = _attempt(trial)
        results: list[tuple[Value, str | None]] | None
        if fault is None:
            results = self._exchange.gather((found, None))
        else:
            first = self._leave(f"({fault}) on rank {self._rank}", forget)
            results = within(_OTHERS_S, lambda: self._exchange.gather((None, first)))
            if results is None:
                raise RuntimeError(
                    f"A trial of tune=True has failed {first}, and another rank waits for this one in a collective of "
                    "the script's own, such as an all_reduce in training_step. Train with tune=False, or give `tuned` "
                    "a file that was measured where it does not fail."
                )
        faults = [each for _, each in results if each is not None]
        if faults:
            raise TrialError(self._leave(faults[0], forget))
        return [value for value, _ in results]

    def close(self) -> None:
        """End the group; a collective unless a trial has failed."""
        if self._store is not None and self._is_nccl:
            self._store.channel.no_more(self._abort_if_failed)
        group, self.group = self.group, None
        if group is not None:
            dist.destroy_process_group(group)
        self._exchange.leave()
        if self._store is not None:
            self._store.close()

    def _leave(self, fault: str, forget: Callable[[], None]) -> str:
        """End this rank's part of the group after a fault, and return the fault that came first.

        Later ones follow from it: they are connections that have closed.
        """
        first = self._store.set_first("fault", fault) if self._store is not None else fault
        group, self.group = self.group, None
        forget()
        if group is not None:
            (_abort_process_group if self._is_nccl else dist.destroy_process_group)(group)
            del group
            gc.collect()  # gloo's connections close with the last reference, and DDP refers to itself
        return first

    def _abort_if_failed(self) -> None:
        """End NCCL's collectives if a trial has failed on another rank. Runs on the channel's thread."""
        group = self.group
        if self._store is not None and group is not None and self._store.get("fault") is not None:
            within(_ABORT_S, group.abort)


def _attempt(trial: Callable[[], Value]) -> tuple[Value | None, str | None]:
    """Return a trial's result, or why it failed; not the error, whose frames would hold tensors and the group."""
    try:
        return trial(), None
    except Exception as error:  # whatever a user's module raises, the other ranks must not wait for this one
        lines = str(error).strip().splitlines() or [""]
        return None, redact_text(f"{type(error).__name__}: {lines[0]}")[:_LONGEST_FAULT]


class RefusalError(Exception):
    """Nothing can be measured in this run; the message says why. Raised on all ranks."""


class TrialBench:
    """Times steps of a module on a batch, and leaves both as they are.

    A step is a forward and a backward pass of a copy of the module, on a copy of the batch. Its `self.log` does
    nothing, and the state of random numbers is restored afterwards. So the training is the same as without trials,
    also if one of them fails.

    Args:
        module: attached to its Trainer.
        arguments, named: of `training_step`.
        wrap: makes DDP of the copy.
        forward: calls the copy's `training_step` through DDP.
    """

    def __init__(
        self, module: LightningModule, arguments: tuple[Any, ...], named: dict[str, Any], wrap: Wrap, forward: Forward
    ) -> None:
        self._module = module
        self._given = arguments, named
        self._wrap = wrap
        self._forward = forward
        self._copy: Any = None
        self._trials: TrialGroup | None = None
        self.steps = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Copy the module; afterwards, free the copy and restore the random numbers.

        Raises:
            RefusalError: a rank cannot copy it.
        """
        drawn = random_state()
        gradients = [each.grad for each in self._module.parameters()]
        self._trials = TrialGroup(self._module.global_rank, self._module.trainer.world_size)

        def make_copy() -> None:
            self._copy = _copied(self._module, self._group)
            copy.deepcopy(self._given)

        try:
            self._together(make_copy, "the module or the batch cannot be copied")
            yield
        finally:
            self._forget()
            self._trials.close()
            self._trials = None
            set_random_state(drawn)
            for parameter, gradient in zip(self._module.parameters(), gradients, strict=True):
                parameter.grad = gradient

    def alone(self, steps: int) -> list[float]:
        """Return the seconds of a step of each rank without communication; the same list on all ranks.

        Each is the fastest of some steps: other load on a node slows down some of them, a slow rank all.

        Raises:
            RefusalError: a step fails on some rank, or nothing is trained by this batch.
        """
        what = "a trial without communication has failed"
        results = self._together(self._try_step, what)
        if not all(has_loss for has_loss, _ in results):
            raise RefusalError("training_step returned no loss for this batch")
        if not all(trains for _, trains in results):
            raise RefusalError("a copy of the module does not train its own parameters")
        return [min(seconds) for seconds in self._together(lambda: self._time(None, steps), what)]

    def measure(self, settings: Settings, steps: int) -> Sequence[float]:
        """Return the seconds of each step after the warm-up, on the slowest rank; the same on all ranks.

        Raises:
            RefusalError: a step fails on some rank.
        """
        what = f"a trial with {settings.words()} has failed"
        return [max(each) for each in zip(*self._together(lambda: self._time(settings, steps), what), strict=True)]

    def _together(self, trial: Callable[[], Value], what: str) -> list[Value]:
        assert self._trials is not None
        try:
            return self._trials.together(trial, self._forget)
        except TrialError as error:
            raise RefusalError(f"{what} {error}") from None

    def _forget(self) -> None:
        self._copy = None
        _free()

    @property
    def _group(self) -> ProcessGroup:
        assert self._trials is not None
        assert self._trials.group is not None
        return self._trials.group

    def _try_step(self) -> tuple[bool, bool]:
        """Return whether there is a loss, and whether its backward pass trains the copy.

        A rank without a loss takes no step, and the others would wait for it: so all must know before.
        """
        ddp = self._wrap(self._copy, Settings(), self._group)
        with ddp.no_sync():
            self.steps += 1
            loss = _loss(self._forward(ddp, self._copy, *copy.deepcopy(self._given)))
            if loss is not None:
                self._copy.backward(loss)
        _release(ddp)
        return loss is not None, any(each.grad is not None for each in self._copy.parameters())

    def _time(self, settings: Settings | None, steps: int) -> list[float]:
        """Return the seconds of this rank's steps after the warm-up; without settings, those without communication."""
        if settings is None:
            warmup = 0
        else:
            warmup = POWERSGD_EXACT_STEPS + 1 if settings.gradient_compression == "powersgd" else _WARMUP_STEPS
        ddp = self._wrap(self._copy, settings or Settings(), self._group)
        with ddp.no_sync() if settings is None else nullcontext():
            seconds = [self._step(ddp) for _ in range(warmup + steps)][warmup:]
        _release(ddp)
        return seconds

    def _step(self, ddp: CompletingDDP) -> float:
        """Return the seconds of one step of this rank. All ranks begin together."""
        given = copy.deepcopy(self._given)
        for parameter in ddp.parameters():
            parameter.grad = None
        self.steps += 1
        _wait_for_device(ddp)
        dist.barrier(self._group)
        begun = time.perf_counter()
        loss = _loss(self._forward(ddp, self._copy, *given))
        assert loss is not None
        ddp.awaits_backward = ddp.require_backward_grad_sync
        ddp.complete_after(loss)
        self._copy.backward(loss)
        _wait_for_device(ddp)
        return time.perf_counter() - begun


def _copied(module: LightningModule, group: ProcessGroup) -> LightningModule:
    """Return a copy whose `self.log` does nothing, and whose collectives use the group."""
    made = copy.deepcopy(module)
    made.trainer = module.trainer
    for part in made.modules():
        if isinstance(part, LightningModule):
            part.log = part.log_dict = lambda *_, **__: None  # type: ignore[method-assign, assignment]
            part.all_gather = partial(part.all_gather, group=group)  # type: ignore[method-assign]
        elif isinstance(part, SyncBatchNorm):
            part.process_group = group
    return made


def _loss(output: Any) -> Tensor | None:
    found = output.get("loss") if isinstance(output, dict) else output
    return found if isinstance(found, Tensor) else None


def _release(ddp: CompletingDDP) -> None:
    del ddp.reducer, ddp.logger
    _free()


def _wait_for_device(ddp: CompletingDDP) -> None:
    device = next(ddp.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free() -> None:
    """Free objects that refer to themselves, as DDP does: its hooks must be gone before the copy is wrapped anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
