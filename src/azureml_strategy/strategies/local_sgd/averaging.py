"""Averages the replicas' parameters: when a part is due, what is sent, and how its average is merged."""

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

# Kinds of exchanges: the first of the numbers that ranks compare before each.
_PART, _STATISTICS, _WHOLE, _EPOCH, _NEW, _MOVED = range(6)
_WORDS = "after step {1} (exchange {0}.{2} of {3:,} numbers, period {4})"


@dataclass
class _PendingExchange:
    """An exchange that has begun and not arrived.

    Attributes:
        part: index of the part; -1 for the statistics.
        due: the step after which it arrives.
        local: this replica's parameters when it began, flat; empty if it arrives at once.
        average: waits for the average, see `Exchanges.begin`.
    """

    part: int
    due: int
    local: Tensor
    average: Callable[[], Tensor]


class PeriodicAveraging:
    """Lets replicas train by themselves, and averages their parameters by `Rules`.

    It knows nothing of Lightning: call `start` before the first step, and `before_step` and `after_step` around each
    step of the optimizer.

    Each part is exchanged once in a period. Without an outer optimizer a replica takes the average of all replicas.
    With one, the average of their changes since the last exchange is a gradient: Nesterov SGD steps with it from the
    common parameters, and all replicas take the result. Buffers such as BatchNorm's statistics are averaged with the
    last part, if nothing is delayed. Otherwise each replica keeps its own, and validation sees their average.

    Args:
        module: its trainable parameters are averaged. One that becomes trainable later is averaged from the next period
            on, or from this one if it has just begun.
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
        self._local_values: dict[str, Tensor] | None = None

    @property
    def are_together(self) -> bool:
        """Whether all replicas have the same parameters: after a step at which all of them arrived at once."""
        rules = self._rules
        at_once = rules.fragments == 1 and not rules.delay and not rules.mixing
        return at_once and self._length > 0 and self.step == self._begun

    def start(self, learning_rate: float) -> int:
        """Begin the first period, and return its length in steps.

        All ranks have the same parameters, unless a state was loaded.
        """
        if self._length == 0:
            self._begin_period(learning_rate)
        self._frozen = {name: fingerprint(each) for name, each in self._untrained().items()}
        return self._length

    def before_step(self) -> None:
        """Note parameters that have become trainable, before their first step; a collective if there are any."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name not in self._shared and name not in self._joining:
                # In a new layer take the first rank's values, otherwise the mean. The mean is the value that all
                # replicas have anyway, unless a parameter was unfrozen within a step and has already taken it.
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
        if self._local_values is not None:  # the module has them already
            yield
            return
        self.show_averages()
        try:
            yield
        finally:
            self.show_local()

    def show_averages(self) -> None:
        """Give the module the averages of parameters and statistics until `show_local`; a collective.

        This needs memory for a copy of the module's own values, and for the share that is being exchanged.
        """
        tensors, counted = {**self._shared, **self._added(), **self._moved()}, statistics(self._module)
        of_module = {**tensors, **counted}
        self._local_values = {name: each.detach().clone() for name, each in of_module.items()}
        try:
            shares = [*cut_shares(tensors), *([_statistics_fragment(counted)] if counted else [])]
            for number, share in enumerate(shares):
                flat = share.read(of_module)
                mean = self._exchanges.begin(*self._place(_WHOLE, number, flat), flat, self._exchanges.mean)
                share.write(self._exchanges.wait(mean), of_module)
        except BaseException:
            self.show_local()  # a checkpoint of the failed training must not mix averages with own values
            raise

    def show_local(self) -> None:
        """Give the module its own values back."""
        if self._local_values is not None:
            self._copy(self._local_values)
            self._local_values = None

    @contextmanager
    def with_local_values(self) -> Iterator[None]:
        """Give the module its own values in this context, if it shows the averages."""
        values, self._local_values = self._local_values, None
        tensors = self._tensors()
        averages = {name: tensors[name].detach().clone() for name in values or {}}
        self._copy(values or {})
        try:
            yield
        finally:
            self._copy(averages)
            self._local_values = values

    def end(self) -> None:
        """Give the module the averages for good, and drop the exchanges that are under way; a collective."""
        self.show_averages()
        self._local_values = None
        self._pending = []

    def compare_steps(self, epoch: int) -> None:
        """Compare the steps of the ranks at the start of an epoch; a collective.

        Raises:
            RanksApartError: a rank has come to another step, or is still in the epoch before.
        """
        nothing = torch.empty(0)
        self._exchanges.begin(*self._place(_EPOCH, epoch, nothing), nothing, _unchanged)()

    def shared_state(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks: steps, and by name common parameters and outer momenta."""
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

    def local_state(self) -> dict[str, Any]:
        """Return the state of this rank alone, besides parameters: exchanges under way, and errors of compression.

        It waits for the exchanges, but does not apply them earlier than they are due.
        """
        under_way = [
            {"part": each.part, "due": each.due, "own": each.local, "average": self._exchanges.wait(each.average)}
            for each in self._pending
        ]
        return {
            "under_way": under_way,
            "residuals": [part.compression.residuals if part.compression else [] for part in self._parts],
        }

    def load(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Go on from states that were saved; before `start`.

        Args:
            shared: of `shared_state`.
            local: this rank's `local_state`, if the module has this rank's parameters. None if it has the averages:
                then a new period begins, with the outer optimizer as it was.
        """
        self.step = shared["step"]
        names = dict(self._module.named_parameters())
        self._shared = {name: names[name] for name in shared["names"] if name in names}
        if shared["length"] == 0:  # it was saved in the warm-up; the parts are cut at the end of that
            return
        device = self._exchanges.device
        self._joining = {n: each.to(device) for n, each in shared["anchor"].items() if n not in self._shared}
        self._cut(shared)
        if local is None:
            return
        self._begun, self._length = shared["begun"], shared["length"]
        for part, residuals in zip(self._parts, local["residuals"], strict=True):
            if part.compression is not None:
                part.compression.residuals = [each.to(device) for each in residuals]
        for each in local["under_way"]:
            arrived = partial(_unchanged, each["average"].to(device))
            self._pending.append(_PendingExchange(each["part"], each["due"], each["own"].to(device), arrived))

    def _begin_period(self, learning_rate: float) -> None:
        """Begin a period. No exchange is under way, so the parts can change."""
        if self._added() or not self._parts:
            self._join()
        self._begun, self._length = self.step, self._rules.length(self.step, learning_rate)
        self._advance()

    def _join(self) -> None:
        """Cut parts anew, with the parameters that have become trainable. Errors of compression are dropped."""
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
        """Apply the exchanges that arrive after this step, and begin those that are due."""
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
            if index == len(self._parts) - 1:  # statistics are averaged with the last part
                begun += self._send_statistics(due)
        if self._rules.delay:
            self._pending += begun
            return
        for each in begun:  # in a loop of its own: all exchanges begin first, so one is sent while the next is copied
            self._arrive(each)

    def _send(self, index: int, due: int) -> _PendingExchange:
        part = self._parts[index]
        local = part.fragment.read(self._shared)
        needed = due > self.step  # otherwise the average replaces it at once
        sent = part.to_send(local, in_place=not needed)
        average = partial(part.mean, exchanges=self._exchanges)
        begun = self._exchanges.begin(*self._place(_PART, index, sent), sent, average)
        return _PendingExchange(index, due, local if needed else local[:0], begun)

    def _send_statistics(self, due: int) -> list[_PendingExchange]:
        tensors = statistics(self._module)
        # A late average would drop the batches that each replica has seen meanwhile. With delay == period these are all
        # batches, so the statistics would stay those of the first exchange while the weights go on.
        if not tensors or self._rules.delay:
            return []
        sent = _statistics_fragment(tensors).read(tensors)
        average = self._exchanges.begin(*self._place(_STATISTICS, 0, sent), sent, self._exchanges.mean)
        return [_PendingExchange(-1, due, sent[:0], average)]

    @torch.no_grad()
    def _arrive(self, arrived: _PendingExchange) -> None:
        average = self._exchanges.wait(arrived.average)
        if arrived.part < 0:
            tensors = statistics(self._module)
            _statistics_fragment(tensors).write(average, tensors)
            return
        part = self._parts[arrived.part]
        merged = part.common(average)
        if self._rules.mixing is not None:
            merged = merged.lerp(part.fragment.read(self._shared), self._rules.mixing)
        elif self._rules.delay:  # keep the steps that were taken since the exchange began
            merged = part.fragment.read(self._shared).sub_(arrived.local).add_(merged)
        part.fragment.write(merged, self._shared)

    def _moved(self) -> dict[str, Tensor]:
        """Return the parameters that change without an optimizer, such as a teacher's; a collective.

        Each replica keeps its own, as they follow parameters that are averaged.
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
        """Return the parameters that are averaged from the next period on."""
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


def _statistics_fragment(tensors: Mapping[str, Tensor]) -> Fragment:
    """Return one fragment in float64, so that a constant that all ranks have, such as a mask, stays what it is.

    In float32, twice the lowest number is infinite, and a third of the sum of three equal numbers may be another one.
    """
    return cut(tensors, 1, torch.float64)[0]
