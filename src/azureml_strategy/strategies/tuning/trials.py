"""Runs forward and backward passes of the user's module on a copy of it, and times them on all ranks."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from azureml_strategy.checkpoint.random_state import random_state, set_random_state
from azureml_strategy.control.gather import gather
from azureml_strategy.strategies.changing_parameters import CompletingDDP
from azureml_strategy.strategies.tuning.settings import Settings

# DDP sorts its buckets anew after its first step, and the second one allocates them.
_WARMUP_STEPS = 2
# PowerSGD's first steps are exact, two at least, and the third allocates its factors.
POWERSGD_EXACT_STEPS = 2

Wrap = Callable[[LightningModule, Settings], CompletingDDP]
Forward = Callable[[CompletingDDP, LightningModule, tuple[Any, ...], dict[str, Any]], Any]


class RefusalError(Exception):
    """Nothing can be measured here; the message says why. Raised on all ranks."""


class TrialBench:
    """Times steps of a module on a batch, and leaves both as they are.

    A step is a forward and a backward pass of a copy of the module, on a copy of the batch. Its `self.log` does
    nothing, and random numbers are drawn again afterwards. So the training that follows is the one that would have been
    without trials.

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
        self.steps = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Copy the module; afterwards, free the copy and put the random numbers back.

        Raises:
            RefusalError: a rank cannot copy it.
        """
        drawn = random_state()
        gradients = [each.grad for each in self._module.parameters()]
        try:
            self._copy = self._agreed_copy()
            yield
        finally:
            self._copy = None
            _free()
            set_random_state(drawn)
            for parameter, gradient in zip(self._module.parameters(), gradients, strict=True):
                parameter.grad = gradient

    def alone(self, steps: int) -> list[float]:
        """Seconds of a step of each rank without communication; the same list on all ranks.

        It is the fastest of some steps: what else runs on a node slows down some of them, a slow rank all.

        Raises:
            RefusalError: nothing is trained by this batch.
        """
        ddp = self._wrap(self._the_copy, Settings())
        with ddp.no_sync():
            self._require_gradients(self._loss(ddp))
            own = [self._step(ddp) for _ in range(steps)]
        del ddp.reducer, ddp.logger, ddp
        _free()
        return [min(each) for each in gather(own)]

    def measure(self, settings: Settings, steps: int) -> Sequence[float]:
        """Seconds of each step, by the slowest rank; the same on all ranks.

        Args:
            settings: of DDP.
            steps: how many to time, after the warm-up.
        """
        exact = POWERSGD_EXACT_STEPS if settings.gradient_compression == "powersgd" else 0
        warmup = max(_WARMUP_STEPS, exact + 1)
        ddp = self._wrap(self._the_copy, settings)
        own = [self._step(ddp) for _ in range(warmup + steps)][warmup:]
        del ddp.reducer, ddp.logger, ddp
        _free()
        return [max(each) for each in zip(*gather(own), strict=True)]

    @property
    def _the_copy(self) -> LightningModule:
        assert self._copy is not None
        return self._copy

    def _agreed_copy(self) -> LightningModule:
        """A copy on all ranks or on none."""
        made, fault = None, None
        try:
            made = _copied(self._module)
            copy.deepcopy(self._given)
        except Exception as error:  # whatever a user's objects do, the other ranks must not wait for this one
            fault = f"{type(error).__name__}: {error}"
        faults = [each for each in gather(fault) if each is not None]
        if made is None or faults:
            raise RefusalError(f"the module or the batch cannot be copied ({faults[0]})")
        return made

    def _step(self, ddp: CompletingDDP) -> float:
        """Seconds of one step of this rank. All ranks begin together."""
        given = copy.deepcopy(self._given)
        for parameter in ddp.parameters():
            parameter.grad = None
        self.steps += 1
        _wait_for_device(ddp)
        dist.barrier()
        begun = time.perf_counter()
        loss = _loss(self._forward(ddp, self._the_copy, *given))
        assert loss is not None
        ddp.awaits_backward = ddp.require_backward_grad_sync
        ddp.complete_after(loss)
        self._the_copy.backward(loss)
        _wait_for_device(ddp)
        return time.perf_counter() - begun

    def _loss(self, ddp: CompletingDDP) -> Tensor | None:
        self.steps += 1
        return _loss(self._forward(ddp, self._the_copy, *copy.deepcopy(self._given)))

    def _require_gradients(self, loss: Tensor | None) -> None:
        """Refuse a batch without a loss, and a module whose copy trains the original, as bound functions make it."""
        if loss is not None:
            self._the_copy.backward(loss)
        trained = any(each.grad is not None for each in self._the_copy.parameters())
        told = gather((loss is not None, trained))
        if not all(has_loss for has_loss, _ in told):
            raise RefusalError("training_step returned no loss for this batch")
        if not all(trains for _, trains in told):
            raise RefusalError("a copy of the module does not train its own parameters")


def _copied(module: LightningModule) -> LightningModule:
    made = copy.deepcopy(module)
    made.trainer = module.trainer
    for part in made.modules():
        if isinstance(part, LightningModule):
            part.log = part.log_dict = _mute  # type: ignore[method-assign]
    return made


def _mute(*_: Any, **__: Any) -> None:
    """In place of `self.log` in a trial."""


def _loss(output: Any) -> Tensor | None:
    found = output.get("loss") if isinstance(output, dict) else output
    return found if isinstance(found, Tensor) else None


def _wait_for_device(ddp: CompletingDDP) -> None:
    device = next(ddp.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free() -> None:
    """Free what refers to itself, as DDP does: its hooks on the parameters must be gone before it is wrapped anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
