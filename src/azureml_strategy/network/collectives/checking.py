"""Whether a collective gave what it must."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from azureml_strategy.network.collectives.contributions import BLOCK, fill
from azureml_strategy.network.collectives.operations import Collective
from azureml_strategy.network.collectives.place import Place

# Elements times ranks that are computed again to check one result: two seconds of one core.
_MOST_COMPUTED = 1 << 26


@dataclass(frozen=True)
class Check:
    """The check of one result.

    Attributes:
        checked: elements compared on each rank.
        wrong: elements that differ, on the rank that has most of them.
    """

    checked: int
    wrong: int


def check(collective: Collective, sent: torch.Tensor, received: torch.Tensor, total: int, place: Place) -> Check:
    """Run a collective once and compare the result with the float64 sum or copy that it must be.

    Every element is compared, up to 64 Mi elements times ranks; of more, evenly spaced ones.

    Args:
        collective: what to check.
        sent: from `Collective.buffers`; overwritten.
        received: the same.
        total: message size in elements.
        place: this process.
    """
    received.fill_(math.nan)
    fill(sent, place.rank, place.world_size)
    collective.run(sent, received, place)
    stride = max(1, math.ceil(received.numel() * place.world_size / _MOST_COMPUTED))
    wrong = 0
    for start in range(0, received.numel(), BLOCK * stride):
        block = slice(start, min(start + BLOCK * stride, received.numel()), stride)
        indices = torch.arange(block.start, block.stop, stride, device=place.device)
        expected = collective.expected(indices, total, place, received.dtype)
        wrong += int((received[block].double() != expected).sum())
    return Check(math.ceil(received.numel() / stride), int(place.highest([wrong])[0]))
