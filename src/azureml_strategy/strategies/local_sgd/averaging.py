"""Averages what replicas have learned: when a part is due, what is sent, and what becomes of the own parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from azureml_strategy.strategies.equal_buffers import fingerprint
from azureml_strategy.strategies.local_sgd.exchange import Exchanges
from azureml_strategy.strategies.local_sgd.fragments import (
    Fragment,
    Part,
    by_name,
    cut,
    cut_parts,
    cut_shares,
    statistics,
    trainable,
)
from azureml_strategy.strategies.local_sgd.period import Rules

# Kinds of exchanges, in what ranks compare before one.
_PART, _STATISTICS, _WHOLE, _EPOCH, _NEW, _MOVED = range(6)
_WORDS = "after step {1} (exchange {0}.{2} of {3:,} numbers, period {4})"


@dataclass
class _PendingExchange:
    """An exchange that has begun and not arrived.

    Attributes:
        part: index of the part; -1 for the statistics.
        due: the step after which it arrives.
        own: what this replica had when it began, flat; empty if it arrives at once.
        average: waits for the average, see `Exchanges.begin`.
    """

    part: int
    due: int
    own: Tensor
    average: Callable[[], Tensor]


class PeriodicAveraging:
    """Lets replicas train by themselves, and averages their parameters by `Rules`.

    It knows nothing of Lightning: call `start` before the first step, and `before_step` and `after_step` around each
    step of the optimizer.

    In a period of H steps each part is exchanged once. Without an outer optimizer a replica takes the average of all
    replicas. With one, the average of what they have changed since the last time is the gradient of a step of Nesterov
    SGD on the common parameters, which all replicas then take. Buffers such as BatchNorm's statistics are averaged with
    the last part, if nothing is delayed; otherwise each replica keeps its own, and validation sees their average.

    Args:
        module: its trainable parameters are averaged; one that becomes trainable later, from the next period on, or
            from this one if it has just begun.
        rules: what is averaged, how often and how.
        exchanges: carries the tensors.

    Attributes:
        step: optimizer steps so far.
    """

    def __init__(self, module: nn.Module, rules: Rules, exchanges: Exchanges) -> None:
        self._module = module
        self._rules = rules
        self._exchanges = exchanges
        self.step = 0
        self._begun = 0
        self._length = 0
        self._shared = trainable(module)
        self._joining: dict[str, Tensor] = {}
        self._names = {name for name, _ in module.named_parameters()}
        self._frozen: dict[str, Tensor] = {}  # hashes of the parameters that did not train at the start
        self._parts: list[Part] = []
        self._pending: list[_PendingExchange] = []
        self._own: dict[str, Tensor] | None = None

    @property
    def are_together(self) -> bool:
        """Whether all replicas have the same parameters: after a step at which all of them arrived at once."""
        rules = self._rules
        at_once = rules.fragments == 1 and not rules.delay and not rules.mixing
        return at_once and self._length > 0 and self.step == self._begun

    def start(self, learning_rate: float) -> int:
        """Begin the first period. All ranks have the same parameters, unless a state was loaded.

        Returns:
            The length of the period, in steps.
        """
        if self._length == 0:
            self._begin_period(learning_rate)
        self._frozen = {name: fingerprint(each) for name, each in self._untrained().items()}
        return self._length

    def before_step(self) -> None:
        """Note parameters that have become trainable, before their first step; a collective if there are any."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name not in self._shared and name not in self._joining:
                # Those of the first rank in a new layer, otherwise the mean. The mean is what replicas have anyway,
                # unless a parameter was unfrozen within a step, which then was its first.
                common = self._exchanges.mean if name in self._names else self._exchanges.first
                wide = torch.promote_types(parameter.dtype, torch.float32)
                flat = parameter.detach().to(wide, copy=True).reshape(-1)
                begun = self._exchanges.begin(*self._place(_NEW, len(self._joining), flat), flat, common)
                parameter.detach().copy_(self._exchanges.wait(begun).view_as(parameter))
                self._joining[name] = parameter.detach().clone()
        if self._joining and self.step == self._begun and not self._pending:
            self._join()

    def after_step(self, learning_rate: float) -> None:
        """Count a step of the optimizer. Begin the exchanges that are due, and apply those that arrive.

        Args:
            learning_rate: of this step, from which a schedule may choose the next period.

        Raises:
            RanksApartError: the ranks have taken unequal numbers of steps.
        """
        self.step += 1
        self._advance()
        if self.step == self._begun + self._length:
            self._begin_period(learning_rate)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the module the averages, and its own values back afterwards; a collective."""
        inside = self._own is not None
        if not inside:
            self.show_averages()
        try:
            yield
        finally:
            if not inside:
                self.show_own()

    def show_averages(self) -> None:
        """Give the module the averages of parameters and statistics until `show_own`; a collective.

        It takes the memory of one further copy of the model, its own values, and of a share that is under way.
        """
        tensors, counted = {**self._shared, **self._added(), **self._moved()}, statistics(self._module)
        of_module = {**tensors, **counted}
        self._own = {name: each.detach().clone() for name, each in of_module.items()}
        try:
            for number, share in enumerate([*cut_shares(tensors), *_statistics_fragment(counted)]):
                flat = share.read(of_module)
                mean = self._exchanges.begin(*self._place(_WHOLE, number, flat), flat, self._exchanges.mean)
                share.write(self._exchanges.wait(mean), of_module)
        except BaseException:
            self.show_own()  # what is saved of a failed training must not be half of each
            raise

    def show_own(self) -> None:
        """Give the module back what this replica has trained."""
        if self._own is not None:
            self._copy(self._own)
            self._own = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """Give the module its own values, if it shows the averages, and these back afterwards."""
        shown, self._own = self._own, None
        tensors = self._tensors()
        averages = {name: tensors[name].detach().clone() for name in shown or {}}
        self._copy(shown or {})
        try:
            yield
        finally:
            self._copy(averages)
            self._own = shown

    def end(self) -> None:
        """Give the module the averages for good; a collective. What is under way is dropped."""
        self.show_averages()
        self._own = None
        self._pending = []

    def compare_steps(self, epoch: int) -> None:
        """Compare the steps of the ranks at the start of an epoch; a collective.

        Raises:
            RanksApartError: a rank has come to another step, or is still in the epoch before.
        """
        nothing = torch.empty(0)
        self._exchanges.begin(*self._place(_EPOCH, epoch, nothing), nothing, _unchanged)()

    def shared_state(self) -> dict[str, Any]:
        """What all ranks have alike: where the period is, common parameters and the outer momentum, by name."""
        anchors = [(part, part.anchor) for part in self._parts if part.anchor is not None]
        momenta = [(part, part.momentum) for part in self._parts if part.momentum is not None]
        return {
            "step": self.step,
            "begun": self._begun,
            "length": self._length,
            "names": list(self._shared),
            "anchor": {**by_name(anchors, self._shared), **self._joining},
            "momentum": by_name(momenta, self._shared),
        }

    def own_state(self) -> dict[str, Any]:
        """What this rank alone has, besides parameters: what it has not sent, and what is under way.

        It waits for what is under way, which is applied no earlier for that.
        """
        under_way = [
            {"part": each.part, "due": each.due, "own": each.own, "average": self._exchanges.wait(each.average)}
            for each in self._pending
        ]
        return {
            "under_way": under_way,
            "residuals": [part.compression.residuals if part.compression else [] for part in self._parts],
        }

    def load(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on from states that were saved; before `start`.

        Args:
            shared: of `shared_state`.
            own: of this rank's `own_state`, whose parameters the module has; None if it has the averages. Then a new
                period begins, with the outer optimizer as it was.
        """
        self.step = shared["step"]
        names = dict(self._module.named_parameters())
        self._shared = {name: names[name] for name in shared["names"] if name in names}
        if shared["length"] == 0:  # it was saved in the warm-up, at whose end the parts are cut
            return
        device = self._exchanges.device
        self._joining = {n: each.to(device) for n, each in shared["anchor"].items() if n not in self._shared}
        self._cut(shared)
        if own is None:
            return
        self._begun, self._length = shared["begun"], shared["length"]
        for part, residuals in zip(self._parts, own["residuals"], strict=True):
            if part.compression is not None:
                part.compression.residuals = [each.to(device) for each in residuals]
        for each in own["under_way"]:
            arrived = partial(_unchanged, each["average"].to(device))
            self._pending.append(_PendingExchange(each["part"], each["due"], each["own"].to(device), arrived))

    def _begin_period(self, learning_rate: float) -> None:
        """Begin a period. Nothing is under way, so the parts can change."""
        if self._added() or not self._parts:
            self._join()
        self._begun, self._length = self.step, self._rules.length(self.step, learning_rate)
        self._advance()

    def _join(self) -> None:
        """Cut parts anew, with the parameters that have become trainable; what parts have not sent is dropped."""
        kept = self.shared_state()
        self._shared |= self._added()
        self._cut(kept)
        self._joining = {}

    def _cut(self, state: Mapping[str, Any]) -> None:
        """Cut parts, which begin with the common parameters and the momentum of a `shared_state`."""
        device = self._exchanges.device
        kept = {kind: {n: t.to(device) for n, t in state[kind].items()} for kind in ("anchor", "momentum")}
        self._parts = cut_parts(self._shared, self._rules, kept["anchor"], kept["momentum"])

    def _advance(self) -> None:
        """Apply what arrives after this step, and begin what is due."""
        arriving = [each for each in self._pending if each.due == self.step]
        self._pending = [each for each in self._pending if each.due != self.step]
        for each in arriving:
            self._arrive(each)
        per_fragment = len(self._parts) // self._rules.fragments
        begun = []
        for index, part in enumerate(self._parts):
            due = self._begun + self._rules.arrival(index // per_fragment, self._length)
            if due - self._rules.delay != self.step:
                continue
            if part.fragment.size:
                begun.append(self._send(index, due))
            if index == len(self._parts) - 1:  # the last part takes the statistics along
                begun += self._send_statistics(due)
        if self._rules.delay:
            self._pending += begun
            return
        for each in begun:  # not before all of them have begun: one is sent while the next is copied
            self._arrive(each)

    def _send(self, index: int, due: int) -> _PendingExchange:
        part = self._parts[index]
        own = part.fragment.read(self._shared)
        needed = due > self.step  # what has arrived at once replaces it
        sent = part.to_send(own, in_place=not needed)
        average = partial(part.mean, exchanges=self._exchanges)
        begun = self._exchanges.begin(*self._place(_PART, index, sent), sent, average)
        return _PendingExchange(index, due, own if needed else own[:0], begun)

    def _send_statistics(self, due: int) -> list[_PendingExchange]:
        tensors = statistics(self._module)
        # A late average would drop what each replica saw meanwhile: with delay == period, all it ever saw, so that the
        # statistics stay those of the first exchange while the weights go on.
        if not tensors or self._rules.delay:
            return []
        sent = _statistics_fragment(tensors)[0].read(tensors)
        average = self._exchanges.begin(*self._place(_STATISTICS, 0, sent), sent, self._exchanges.mean)
        return [_PendingExchange(-1, due, sent[:0], average)]

    @torch.no_grad()
    def _arrive(self, arrived: _PendingExchange) -> None:
        average = self._exchanges.wait(arrived.average)
        if arrived.part < 0:
            tensors = statistics(self._module)
            _statistics_fragment(tensors)[0].write(average, tensors)
            return
        part = self._parts[arrived.part]
        merged = part.common(average)
        if self._rules.mixing is not None:
            merged = merged.lerp(part.fragment.read(self._shared), self._rules.mixing)
        elif self._rules.delay:  # keep the steps that were taken since the exchange began
            merged = part.fragment.read(self._shared).sub_(arrived.own).add_(merged)
        part.fragment.write(merged, self._shared)

    def _moved(self) -> dict[str, Tensor]:
        """The parameters that change without being trained, such as a teacher that follows; a collective.

        Each replica keeps its own, which follow parameters that are averaged.
        """
        untrained = self._untrained()
        if not untrained:
            return {}
        now = torch.stack([fingerprint(each) for each in untrained.values()])
        before = torch.stack([self._frozen.get(name, torch.zeros_like(now[0])) for name in untrained])
        changed = (now != before).float()
        mean = self._exchanges.begin(*self._place(_MOVED, 0, changed), changed, self._exchanges.mean)
        on_any = dict(zip(untrained, self._exchanges.wait(mean).tolist(), strict=True))
        return {name: each for name, each in untrained.items() if on_any[name]}

    def _untrained(self) -> dict[str, Tensor]:
        averaged = {*self._shared, *self._joining}
        named = self._module.named_parameters()
        return {name: each for name, each in named if name not in averaged and each.is_floating_point()}

    def _added(self) -> dict[str, Tensor]:
        """The parameters that join with the next period."""
        named = dict(self._module.named_parameters())
        return {name: named[name] for name in self._joining if name in named}

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    @torch.no_grad()
    def _copy(self, values: Mapping[str, Tensor]) -> None:
        tensors = self._tensors()
        for name, value in values.items():
            tensors[name].detach().copy_(value)

    def _place(self, kind: int, number: int, tensor: Tensor) -> tuple[tuple[int, ...], str]:
        return (kind, self.step, number, tensor.numel(), self._length), _WORDS


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _statistics_fragment(tensors: Mapping[str, Tensor]) -> list[Fragment]:
    """Return one fragment in float64, so that a constant that all ranks have, such as a mask, stays what it is.

    In float32 the sum of two of the least numbers is infinite, and a third of a sum of three is another number.
    """
    return [Fragment(each.pieces, torch.float64) for each in cut(tensors, 1)] if tensors else []
