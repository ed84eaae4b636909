"""Runs forward and backward passes of the user's module on a copy of it, and times them on all ranks, in a process
group that can end on all ranks when a trial fails on one.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
# Seconds between two looks at whether a trial has failed on another rank, which only NCCL needs.
_LOOK_S = 0.5
# An abort waits for nobody.
_ABORT_S = 10.0
# How long a rank whose trial has failed waits for the others. They wait for it in vain if training_step has a
# collective of its own, which is not of this group.
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
    """A trial failed on some rank; raised on all. The message says why, and on which: `(OSError: why) on rank 3`."""


class TrialGroup:
    """A process group beside the training's own, for what may fail on one rank while the others are in a collective.

    A rank that fails leaves this group. With gloo its connections close, so that the collectives of the others fail,
    too. NCCL's would wait: so the rank writes into the rendezvous store, and the others look there and abort theirs.
    The training's own group is as it was. Making one is a collective.

    Args:
        rank: this process's global rank.
        world_size: number of ranks.
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
        """Run a trial on all ranks.

        Args:
            trial: what may fail, and uses no collective but those of this group.
            forget: drops what holds on to this group, such as DDP, before the group ends.

        Returns:
            What it returned on each rank, in the order of ranks; the same on all ranks.

        Raises:
            TrialError: it failed on some rank.
            RuntimeError: it failed here, and the other ranks are elsewhere.
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

        The others follow from that one: they are connections that have closed.
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
        """On the channel's thread: end NCCL's collectives if a trial has failed on another rank."""
        group = self.group
        if self._store is not None and group is not None and self._store.get("fault") is not None:
            within(_ABORT_S, group.abort)


def _attempt(trial: Callable[[], Value]) -> tuple[Value | None, str | None]:
    """Return what a trial returned, or why it failed. None of its frames stays: it would hold tensors and the group."""
    try:
        return trial(), None
    except Exception as error:  # whatever a user's module does, the other ranks must not wait for this one
        lines = str(error).strip().splitlines() or [""]
        return None, redact_text(f"{type(error).__name__}: {lines[0]}")[:_LONGEST_FAULT]


class RefusalError(Exception):
    """Nothing can be measured here; the message says why. Raised on all ranks."""


class TrialBench:
    """Times steps of a module on a batch, and leaves both as they are.

    A step is a forward and a backward pass of a copy of the module, on a copy of the batch. Its `self.log` does
    nothing, and random numbers are drawn again afterwards. So the training that follows is the one that would have been
    without trials, also if one of them fails.

    Args:
        module: the user's, attached to its Trainer.
        arguments: of `training_step`, positional.
        named: of `training_step`, by name.
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
        self._copy: LightningModule | None = None
        self._trials: TrialGroup | None = None
        self.steps = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Copy the module; afterwards, free the copy and put the random numbers back.

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
        """Seconds of a step of each rank without communication; the same list on all ranks.

        It is the fastest of some steps: what else runs on a node slows down some of them, a slow rank all.

        Raises:
            RefusalError: a step fails on some rank, or nothing is trained by this batch.
        """
        what = "a trial without communication has failed"
        results = self._together(self._try_step, what)
        if not all(has_loss for has_loss, _ in results):
            raise RefusalError("training_step returned no loss for this batch")
        if not all(trains for _, trains in results):
            raise RefusalError("a copy of the module does not train its own parameters")
        return [min(seconds) for seconds in self._together(lambda: self._time_alone(steps), what)]

    def measure(self, settings: Settings, steps: int) -> Sequence[float]:
        """Seconds of each step, by the slowest rank; the same on all ranks.

        Args:
            settings: of DDP.
            steps: how many to time, after the warm-up.

        Raises:
            RefusalError: a step fails on some rank.
        """
        what = f"a trial with {settings.words()} has failed"
        return [max(each) for each in zip(*self._together(lambda: self._time(settings, steps), what), strict=True)]

    def _together(self, trial: Callable[[], Value], what: str) -> list[Value]:
        """What a trial returns on each rank."""
        assert self._trials is not None
        try:
            return self._trials.together(trial, self._forget)
        except TrialError as error:
            raise RefusalError(f"{what} {error}") from None

    def _forget(self) -> None:
        self._copy = None
        _free()

    @property
    def _the_copy(self) -> LightningModule:
        assert self._copy is not None
        return self._copy

    @property
    def _group(self) -> ProcessGroup:
        assert self._trials is not None
        assert self._trials.group is not None
        return self._trials.group

    def _try_step(self) -> tuple[bool, bool]:
        """Return whether there is a loss, and whether its backward pass trains the copy.

        A rank on which there is none takes no step, for which the others would wait: so all must know it before.
        """
        ddp = self._wrap(self._the_copy, Settings(), self._group)
        with ddp.no_sync():
            self.steps += 1
            loss = _loss(self._forward(ddp, self._the_copy, *copy.deepcopy(self._given)))
            if loss is not None:
                self._the_copy.backward(loss)
        _release(ddp)
        return loss is not None, any(each.grad is not None for each in self._the_copy.parameters())

    def _time_alone(self, steps: int) -> list[float]:
        """Return the seconds of this rank's steps without communication."""
        ddp = self._wrap(self._the_copy, Settings(), self._group)
        with ddp.no_sync():
            seconds = [self._step(ddp) for _ in range(steps)]
        _release(ddp)
        return seconds

    def _time(self, settings: Settings, steps: int) -> list[float]:
        """Return the seconds of this rank's steps, without the warm-up."""
        exact = POWERSGD_EXACT_STEPS if settings.gradient_compression == "powersgd" else 0
        warmup = max(_WARMUP_STEPS, exact + 1)
        ddp = self._wrap(self._the_copy, settings, self._group)
        seconds = [self._step(ddp) for _ in range(warmup + steps)][warmup:]
        _release(ddp)
        return seconds

    def _step(self, ddp: CompletingDDP) -> float:
        """Seconds of one step of this rank. All ranks begin together."""
        given = copy.deepcopy(self._given)
        for parameter in ddp.parameters():
            parameter.grad = None
        self.steps += 1
        _wait_for_device(ddp)
        dist.barrier(self._group)
        begun = time.perf_counter()
        loss = _loss(self._forward(ddp, self._the_copy, *given))
        assert loss is not None
        ddp.awaits_backward = ddp.require_backward_grad_sync
        ddp.complete_after(loss)
        self._the_copy.backward(loss)
        _wait_for_device(ddp)
        return time.perf_counter() - begun


def _copied(module: LightningModule, group: ProcessGroup) -> LightningModule:
    """A copy whose `self.log` does nothing, and whose collectives are those of a group."""

    def mute(*_: Any, **__: Any) -> None:
        """In place of `self.log` in a trial."""

    made = copy.deepcopy(module)
    made.trainer = module.trainer
    for part in made.modules():
        if isinstance(part, LightningModule):
            part.log = part.log_dict = mute  # type: ignore[method-assign]
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
    """Free what refers to itself, as DDP does: its hooks on the parameters must be gone before it is wrapped anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
