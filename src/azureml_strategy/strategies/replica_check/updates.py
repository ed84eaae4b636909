"""Finds parameters that do not train: those with a gradient and an optimizer must change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from azureml_strategy.strategies.deepspeed_internals import FlatSlice, has_gradients, is_of_zero
from azureml_strategy.strategies.replica_check.fingerprints import Transfer

# Steps are observed at powers of two, up to this one.
_LAST_STEP = 1024
# Warnings are given after these steps, and at the end of training.
_WARNED_AFTER = (8, 64, 512, _LAST_STEP)
# If no parameter at all has changed, a warning waits for this many steps: a module may accumulate by itself.
_STEPS_OF_ALL = 64
# A gradient below this share of the largest one is rounding: a bias before a normalisation has no other.
_NEGLIGIBLE = 1e-4
# Small parameters of one shape are compared together, up to about this many elements.
_MOST_TOGETHER = 1 << 18
_MOST_NAMES = 5
_ROUNDED = (
    "Parameters lose their updates to rounding: in the first {steps} steps these had gradients and have not changed: "
    "{names}. They are {type}, in which a weight of 1 cannot change by less than some thousandths. Train them in "
    "float32, as precision='bf16-mixed' does, or with a larger learning rate."
)
_UNCHANGED = (
    "Parameters do not train: in the first {steps} steps these had gradients and an optimizer with a learning rate "
    "above 0, and have not changed: {names}. Something puts them back or replaces the optimizer's step, or the "
    "learning rate is too small for their type."
)
_IN_NO_OPTIMIZER = (
    "Parameters have gradients but no optimizer, so that they do not train: {names}. Give them to an optimizer in "
    "configure_optimizers, or call requires_grad_(False) on them, which saves the time of their gradients."
)
_NO_GRADIENT = (
    "Optimizer {number} has stepped {steps} times, and none of its {count} parameters has had a gradient. {why}"
)
_REPLACED = (
    "{count} of them are no longer the module's: they were replaced after configure_optimizers. Make new layers in "
    "configure_model or __init__."
)
_NOT_REACHED = "The loss does not reach them: look for detach(), no_grad(), or the parameters of another optimizer."


class _Trained(NamedTuple):
    """What this rank has of a parameter that a step is about to change.

    Attributes:
        parameter: the module's.
        values: reads what the optimizer changes.
        gradient: reads the gradient, in the shape of the values.
        rate: learning rate.
        scale: the gradient is multiplied with it.
        is_part: whether other ranks have the rest. Then this rank does not know which gradients are small.
    """

    parameter: nn.Parameter
    values: Callable[[], Tensor]
    gradient: Callable[[], Tensor | None]
    rate: float
    scale: float = 1.0
    is_part: bool = False


@dataclass
class _History:
    """What the observed steps have shown of a parameter that an optimizer has.

    Attributes:
        optimizer: the class of its optimizer.
        type: of the values that the optimizer changes.
        pushed: number of observed steps in which its gradient was more than rounding.
        changed: whether it has ever changed.
        has_gradient: whether it has ever had a gradient, of any size.
    """

    optimizer: type[Optimizer]
    type: torch.dtype
    pushed: int = 0
    changed: bool = False
    has_gradient: bool = False


class _Step:
    """An observed step.

    Args:
        skipped: how many steps DeepSpeed has left out before.
    """

    def __init__(self, skipped: int) -> None:
        self._skipped = skipped
        self._alike: dict[Any, tuple[list[_Trained], list[Tensor]]] = {}
        self._parameters: list[int] = []  # ids
        # Each returns two rows after the step: the largest gradients of some parameters, and 1 where they have changed.
        self._found: list[Callable[[], Tensor]] = []

    def add(self, trained: _Trained, gradient: Tensor) -> None:
        """Note a parameter that is about to change, unless its gradient is sparse."""
        values, local = trained.values(), _local(gradient)
        if local.layout != torch.strided or not local.numel() or values.shape != local.shape:
            return
        key = (local.shape, local.dtype, local.device, values.dtype, values.device, *trained[3:])
        together, gradients = self._alike.setdefault(key, ([], []))
        together.append(trained)
        gradients.append(local)
        if len(together) * local.numel() >= _MOST_TOGETHER:
            self._note(*self._alike.pop(key))

    def begin(self) -> None:
        """Look at all that was added."""
        for each in self._alike.values():
            self._note(*each)
        self._alike.clear()

    def _note(self, trained: list[_Trained], gradients: list[Tensor]) -> None:
        """Note parameters of one shape and type, each at the place of its largest gradient."""
        largest, places = _rows(gradients).abs().max(dim=1, keepdim=True)

        def values() -> Tensor:
            return _rows([each.values() for each in trained]).gather(1, places)

        before = values()
        largest = largest / trained[0].scale
        if trained[0].is_part:
            # A gradient counts only if plain descent would change the value: a smaller update may be rounded off.
            largest = torch.where(before - trained[0].rate * largest != before, largest, 0)
        self._parameters += [id(each.parameter) for each in trained]
        self._found.append(lambda: torch.cat([largest.float(), (values() != before).float()], dim=1).T)

    def end(self, skipped: int) -> _Outcome | None:
        """See what has changed; None if nothing was noted, or DeepSpeed has skipped a step meanwhile."""
        if skipped != self._skipped or not self._found:
            return None
        return self._parameters, Transfer([found() for found in self._found])


# Of a step: the ids of the observed parameters, and two rows about some of them after others.
_Outcome = tuple[list[int], Transfer]


class UpdateWatch:
    """Observes steps 1, 2, 4, 8 and so on until each parameter that has a gradient has changed.

    A parameter is compared at the place of its largest gradient. A step with gradients that are not finite does not
    count, as a scaler skips it. Nor does one with a learning rate of 0, nor any while a learning rate rises.

    Attributes:
        has_news: whether `after_batch` and `verdict` have something to do. Most steps are not observed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.has_news = False
        self._trainer = trainer
        self._histories: dict[int, _History] = {}  # by the id of the parameter
        self._under_way: list[_Step] = []
        self._outcomes: list[_Outcome] = []
        self._rates: dict[int, float] = {}  # the last learning rates, by the id of the parameter group
        self._rising: dict[int, bool] = {}  # by the id of the optimizer, as in the next ones
        self._stepped: dict[int, int] = {}
        self._settled: dict[int, int] = {}  # how many parameters an optimizer had when all of them had changed
        self._judged_at = self._observed = 0  # the highest step of an optimizer
        self._warned_of: set[str] = set()
        self._had_gradient: set[int] = set()  # ids of parameters
        self._largest = 0.0  # of all gradients that were observed

    def is_due(self, optimizer: Optimizer) -> bool:
        """Count a step that an optimizer of the trainer is about to make, and say whether to observe it."""
        number = self._stepped.get(id(optimizer), 0) + 1
        self._stepped[id(optimizer)] = number
        return number & (number - 1) == 0 and number <= _LAST_STEP

    def before_step(self, optimizer: Optimizer) -> None:
        """Note what the optimizer is about to change. Its gradients are ready, and the step `is_due`."""
        number = self._stepped[id(optimizer)]
        self._observed = max(self._observed, number)
        if number in (1, *_WARNED_AFTER):
            # Some engines clear all gradients after a step, also those that no optimizer uses.
            parameters = self._trainer.lightning_module.parameters()
            self._had_gradient.update(id(each) for each in parameters if each.grad is not None)
            self.has_news = True
        if self._settled.get(id(optimizer)) != _count(optimizer):
            self._observe(optimizer)

    def after_batch(self) -> None:
        """See what has changed, as far as the device has computed it."""
        steps, self._under_way = self._under_way, []
        with torch.no_grad():
            outcomes = [each.end(self._skipped()) for each in steps]
        self._outcomes += [outcome for outcome in outcomes if outcome is not None]
        if self._outcomes:
            self._count_outcomes(wait=False)
        self.has_news = bool(self._outcomes)

    def verdict(self, at_end: bool) -> list[str]:
        """Return a warning of each thing that does not train, once.

        Args:
            at_end: whether no further step follows.
        """
        if not at_end and (self._observed == self._judged_at or self._observed not in _WARNED_AFTER or self._outcomes):
            return []
        self._judged_at = self._observed
        self._count_outcomes(wait=True)
        found = [] if any(self._rising.values()) else [*self._unchanged(at_end)]
        found += [*self._in_no_optimizer(), *self._not_of_module()]
        new = [text for key, text in found if key not in self._warned_of]
        self._warned_of |= {key for key, _ in found}
        return new

    @torch.no_grad()
    def _observe(self, optimizer: Optimizer) -> None:
        """Note the parameters that have not changed yet."""
        step, settled = _Step(self._skipped()), True
        for trained in self._trained_by(optimizer):
            key = id(trained.parameter)
            history = self._histories.get(key)
            if history is None:
                history = self._histories[key] = _History(type(optimizer), trained.values().dtype)
            if history.changed:
                continue
            settled = False
            gradient = trained.gradient()
            history.has_gradient |= gradient is not None
            if gradient is not None and trained.rate:
                step.add(trained, gradient)
        if settled:
            self._settled[id(optimizer)] = _count(optimizer)
            return
        step.begin()
        self._under_way.append(step)
        self.has_news = True

    def _named(self) -> dict[int, tuple[str, nn.Parameter]]:
        return {id(each): (name, each) for name, each in self._trainer.lightning_module.named_parameters()}

    def _trained_by(self, optimizer: Optimizer) -> Iterator[_Trained]:
        """List what a step of the optimizer changes, but for groups whose learning rate lies on a GPU."""
        rates = self._rates_of(optimizer)
        of_zero = [each for each in self._trainer.lightning_module.parameters() if is_of_zero(each)]
        for each in of_zero:  # of each, this rank keeps a slice on the device
            part = FlatSlice(each)
            values, place = part.trained(), part.group
            rate = None if place is None else rates[place]
            if values is not None and rate is not None and has_gradients(each):
                yield _Trained(each, values.detach, part.read, rate, part.scale, is_part=True)
        if of_zero:  # the optimizer's own parameters are flat rows of the slices
            return
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                for each in group["params"]:
                    yield _Trained(each, partial(_local, each), partial(getattr, each, "grad"), rate)

    def _rates_of(self, optimizer: Optimizer) -> list[float | None]:
        """Return the learning rate of each group, and note whether one rises; None if reading it would wait."""
        rates: list[float | None] = []
        self._rising[id(optimizer)] = False
        for group in optimizer.param_groups:
            rate = group.get("lr", 1.0)
            if isinstance(rate, Tensor) and not rate.is_cpu:
                rates.append(None)
                continue
            self._rising[id(optimizer)] |= float(rate) > self._rates.get(id(group), float("inf"))
            self._rates[id(group)] = float(rate)
            rates.append(float(rate))
        return rates

    def _skipped(self) -> int:
        """How many steps DeepSpeed has left out because gradients were infinite on some rank."""
        return int(getattr(self._trainer.model, "skipped_steps", 0))

    def _count_outcomes(self, wait: bool) -> None:
        while self._outcomes and (wait or self._outcomes[0][1].is_ready()):
            parameters, found = self._outcomes.pop(0)
            pairs = found.values()
            largest = [each for gradients, _ in pairs for each in gradients]
            changed = [bool(each) for _, changes in pairs for each in changes]
            if not all(each < float("inf") for each in largest):  # infinite or NaN
                continue
            self._largest = max(self._largest, *largest)
            for parameter, gradient, moved in zip(parameters, largest, changed, strict=True):
                history = self._histories[parameter]
                history.changed |= moved
                history.pushed += gradient > _NEGLIGIBLE * self._largest

    def _unchanged(self, at_end: bool) -> Iterator[tuple[str, str]]:
        pushed = [key for key, each in self._histories.items() if each.pushed >= 2 and not each.changed]
        named = self._named() if pushed else {}
        still = [named[key] for key in pushed if key in named]
        if not still:
            return
        none = not any(each.changed for each in self._histories.values())
        if none and self._observed < _STEPS_OF_ALL and not at_end:
            return
        halves = (torch.bfloat16, torch.float16)
        small = [(name, each) for name, each in still if self._histories[id(each)].type in halves]
        # Other optimizers may keep what is rounded off, or weights in float32, and give it back after some steps.
        of_torch = "torch.optim."
        lost = [each for each in small if self._histories[id(each[1])].optimizer.step.__module__.startswith(of_torch)]
        if lost and not none:
            yield (
                "rounded",
                _ROUNDED.format(steps=self._observed, names=_listed(lost), type=self._histories[id(lost[0][1])].type),
            )
        others = still if none else [each for each in still if each not in small]
        if others:
            yield "unchanged", _UNCHANGED.format(steps=self._observed, names=_listed(others))

    def _in_no_optimizer(self) -> Iterator[tuple[str, str]]:
        ids = {id(p) for each in self._trainer.optimizers for group in each.param_groups for p in group["params"]}
        had = self._had_gradient - ids
        named = self._named() if had else {}
        left = [(name, each) for key, (name, each) in named.items() if key in had and each.requires_grad]
        left = [(name, each) for name, each in left if not is_of_zero(each)]  # those of ZeRO are trained as slices
        # With manual optimization, a module may step an optimizer that Lightning does not know.
        if left and (ids or self._histories) and self._trainer.lightning_module.automatic_optimization:
            yield "no optimizer", _IN_NO_OPTIMIZER.format(names=_listed(left))

    def _not_of_module(self) -> Iterator[tuple[str, str]]:
        for number, optimizer in enumerate(self._trainer.optimizers):
            parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
            known = [self._histories[id(each)] for each in parameters if id(each) in self._histories]
            steps = self._stepped.get(id(optimizer), 0)
            if steps >= 2 and len(known) == len(parameters) > 0 and not any(each.has_gradient for each in known):
                named = self._named()
                gone = sum(id(each) not in named for each in parameters)
                why = _REPLACED.format(count=gone) if gone else _NOT_REACHED
                count = len(parameters)
                yield f"optimizer {number}", _NO_GRADIENT.format(number=number, steps=steps, count=count, why=why)


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """Flatten tensors of one shape into the rows of a matrix; a view of a single one."""
    return tensors[0].reshape(1, -1) if len(tensors) == 1 else torch.stack(list(tensors)).flatten(1)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _listed(parameters: list[tuple[str, Any]]) -> str:
    names = ", ".join(name for name, _ in parameters[:_MOST_NAMES])
    return names + (f" and {len(parameters) - _MOST_NAMES:,} more" if len(parameters) > _MOST_NAMES else "")
