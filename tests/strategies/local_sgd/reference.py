"""Periodic averaging in one process, written down from the papers: replicas in a list, means by hand.

Local SGD: Stich 2018, https://arxiv.org/abs/1805.09767. DiLoCo: Douillard et al. 2023, https://arxiv.org/abs/2311.08105;
fragments, delay and mixing: https://arxiv.org/abs/2501.18512. Its outer optimizer is torch's own SGD.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@dataclass(frozen=True)
class Rules:
    """What `AzureMLLocalSGDStrategy` is given, as far as it is computed here."""

    period: int
    warmup_steps: int = 0
    outer_learning_rate: float | None = None
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None


@dataclass
class Exchange:
    """The mean of a part when it began, and what each replica had then."""

    mean: Tensor
    sent: list[Tensor]


class Part:
    """Elements of the flat parameters, with what all replicas have in common."""

    def __init__(self, elements: slice, common: Tensor, rules: Rules) -> None:
        self.elements = elements
        self.common = nn.Parameter(common.clone())
        rate, momentum = rules.outer_learning_rate, rules.outer_momentum
        self.outer = None if rate is None else torch.optim.SGD([self.common], rate, momentum, nesterov=momentum > 0)
        self.exchange: Exchange | None = None

    def begin(self, replicas: Sequence[Tensor]) -> None:
        sent = [replica[self.elements].clone() for replica in replicas]
        self.exchange = Exchange(torch.stack(sent).mean(0), sent)

    @torch.no_grad()
    def arrive(self, replicas: Sequence[Tensor], mixing: float | None) -> None:
        if self.exchange is None:  # the first one would have begun before the training
            return
        if self.outer is None:
            self.common.copy_(self.exchange.mean)
        else:
            self.common.grad = self.common.detach() - self.exchange.mean
            self.outer.step()
        for replica, sent in zip(replicas, self.exchange.sent, strict=True):
            own = replica[self.elements].clone()
            mixed = self.common + (own - sent) if mixing is None else (1 - mixing) * self.common + mixing * own
            replica[self.elements] = mixed
        self.exchange = None


class Averaging:
    """Replicas that are averaged by the rules; `after_step` when all of them have taken a step."""

    def __init__(self, modules: Sequence[nn.Module], rules: Rules) -> None:
        self.modules, self.rules, self.position = modules, rules, 0
        common = parameters_to_vector(modules[0].parameters()).detach()
        ends = [len(common) * part // rules.fragments for part in range(rules.fragments + 1)]
        elements = [slice(*each) for each in itertools.pairwise(ends)]
        self.parts = [Part(each, common[each], rules) for each in elements]
        self._begin([common] * len(modules))

    @torch.no_grad()
    def after_step(self) -> None:
        replicas = [parameters_to_vector(module.parameters()).detach() for module in self.modules]
        self.position += 1
        if self.rules.delay == 0:
            self._begin(replicas)
        for part, each in enumerate(self.parts):
            if self._arrival(part) == self.position:
                each.arrive(replicas, self.rules.mixing)
        self.position %= self.rules.period
        if self.rules.delay:  # what has just arrived goes along
            self._begin(replicas)
        for module, replica in zip(self.modules, replicas, strict=True):
            vector_to_parameters(replica, module.parameters())

    def _arrival(self, part: int) -> int:
        return self.rules.period * (part + 1) // self.rules.fragments

    def _begin(self, replicas: Sequence[Tensor]) -> None:
        for part, each in enumerate(self.parts):
            if self._arrival(part) - self.rules.delay == self.position:
                each.begin(replicas)


def train(
    modules: Sequence[Any], rules: Rules, reads: Sequence[Sequence[Any]], accumulate: int = 1, clip: float | None = None
) -> list[list[list[float]]]:
    """Train the replicas on what each reads in three epochs, and return each one's parameters after each batch.

    Args:
        modules: equal ones, with `loss` and `configure_optimizers`, see `replicas.Replica`.
        rules: see there.
        reads: for each replica its batches.
        accumulate: batches of an optimizer step; the last ones of an epoch are one too.
        clip: the norm that each replica's gradients are cut to.
    """
    set_up = [_optimizer(module) for module in modules]
    averaging: Averaging | None = None
    taken, weights = 0, [[] for _ in modules]  # type: ignore[var-annotated]
    epoch = len(reads[0]) // 3
    for number, batches in enumerate(zip(*reads, strict=True)):
        for module, batch in zip(modules, batches, strict=True):
            (module.loss(batch) / accumulate).backward()
        in_epoch = number % epoch + 1
        if in_epoch % accumulate == 0 or in_epoch == epoch:
            if averaging is None and taken >= rules.warmup_steps:
                averaging = Averaging(modules, rules)
            if averaging is None:
                _average_gradients(modules)
            _step(modules, set_up, clip)
            taken += 1
            if averaging is not None:
                averaging.after_step()
        for module, history in zip(modules, weights, strict=True):
            history.append(parameters_to_vector(module.parameters()).tolist())
    return weights


def _step(modules: Sequence[nn.Module], set_up: Sequence[tuple[Any, Any]], clip: float | None) -> None:
    for module, (optimizer, schedule) in zip(modules, set_up, strict=True):
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def _optimizer(module: Any) -> tuple[torch.optim.Optimizer, Any]:
    made = module.configure_optimizers()
    return (made["optimizer"], made["lr_scheduler"]["scheduler"]) if isinstance(made, dict) else (made, None)


def _average_gradients(modules: Sequence[nn.Module]) -> None:
    for parameters in zip(*(module.parameters() for module in modules), strict=True):
        mean = torch.stack([each.grad for each in parameters if each.grad is not None]).mean(0)
        for each in parameters:
            each.grad = mean.clone()
