"""A part of the parameters, and what a replica keeps for it: the common parameters, and what comes to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD

from azureml_strategy.strategies.local_sgd.exchange import Compression, Exchanges
from azureml_strategy.strategies.local_sgd.fragments import Fragment, cut
from azureml_strategy.strategies.local_sgd.period import Rules

# 32 MiB in float32. While one part is sent, the next is copied; and a part takes far longer than the network's latency.
_MOST_ELEMENTS = 2**23


@dataclass
class Part:
    """A fragment of the parameters, or a share of a large fragment, which is exchanged at once; and its state.

    Attributes:
        fragment: its pieces of tensors.
        anchor: the common parameters after the last exchange, flat; None where changes are not counted.
        outer: the optimizer that applies the average of the changes to the anchor.
        compression: of the changes, with what it has not sent yet.
    """

    fragment: Fragment
    anchor: Tensor | None = None
    outer: SGD | None = None
    compression: Compression | None = None

    @property
    def momentum(self) -> Tensor | None:
        """The momentum of the outer optimizer, flat; None before its first step, and where there is none."""
        if self.outer is None or self.anchor is None:
            return None
        momentum: Tensor | None = self.outer.state[self.anchor].get("momentum_buffer")
        return momentum

    def to_send(self, own: Tensor, in_place: bool) -> Tensor:
        """Return what is averaged: the parameters, or how they have changed.

        Args:
            own: what this replica has, flat.
            in_place: take the memory of `own` for it, which nobody needs any more.
        """
        if self.anchor is None:
            return own if in_place else own.clone()
        return torch.sub(self.anchor, own, out=own if in_place else None)

    def mean(self, sent: Tensor, exchanges: Exchanges) -> Tensor:
        """Average what all ranks send. On the thread of the exchanges."""
        return exchanges.mean(sent) if self.compression is None else self.compression.mean(sent, exchanges)

    def common(self, average: Tensor) -> Tensor:
        """The common parameters after an exchange, flat. A change counts as a gradient: what was there minus what is.

        Args:
            average: of what the ranks have sent.
        """
        if self.anchor is None:
            return average
        if self.outer is None:
            return self.anchor.sub_(average)
        self.anchor.grad = average
        self.outer.step()
        self.anchor.grad = None
        return self.anchor


def cut_parts(
    shared: Mapping[str, Tensor], rules: Rules, anchors: Mapping[str, Tensor], momenta: Mapping[str, Tensor]
) -> list[Part]:
    """Cut parameters into parts.

    Args:
        shared: the parameters, by name.
        rules: how many parts, and what is kept for them.
        anchors: common parameters so far, by name; those that are missing are as they are now.
        momenta: of the outer optimizer so far, by name; those that are missing are zero.
    """
    fragments = cut_shares(shared, rules.fragments)
    if not rules.anchored:
        return [Part(each) for each in fragments]
    common = {name: anchors.get(name, each) for name, each in shared.items()}
    parts = [Part(each, each.read(common)) for each in fragments]
    for part in parts:
        if rules.compression is not None:
            part.compression = Compression(rules.compression)
        if rules.outer_learning_rate is None:
            continue
        momentum = rules.outer_momentum
        assert part.anchor is not None
        part.outer = SGD([part.anchor], rules.outer_learning_rate, momentum, nesterov=momentum > 0)
        if momenta and momentum > 0:
            zeros = {name: torch.zeros_like(each, dtype=part.fragment.dtype) for name, each in shared.items()}
            part.outer.state[part.anchor]["momentum_buffer"] = part.fragment.read({**zeros, **momenta})
    return parts


def cut_shares(tensors: Mapping[str, Tensor], fragments: int = 1) -> list[Fragment]:
    """Cut tensors into fragments, and each into as many shares as it needs to be exchanged in little memory."""
    elements = sum(each.numel() for each in tensors.values())
    return cut(tensors, fragments * max(1, math.ceil(elements / fragments / _MOST_ELEMENTS)))


def by_name(flats: list[tuple[Part, Tensor]], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flat tensors of parts as tensors in the shapes of the parameters, on the host."""
    if not flats:
        return {}
    # Zeros, as a part may have nothing yet: the momentum before its first exchange.
    named = {name: torch.zeros(each.shape, dtype=flats[0][1].dtype) for name, each in shared.items()}
    for part, flat in flats:
        part.fragment.write(flat.cpu(), named)
    return named
