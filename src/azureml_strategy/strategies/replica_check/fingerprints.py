"""Hashes of many tensors in a few kernels, read without waiting for the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from azureml_strategy.strategies.equal_buffers import INTEGERS, place_weights
from azureml_strategy.strategies.replica_check.transfers import Transfer

# Of all tensors together, about so many elements are read, spread over each; of each at least so many.
_MOST_ELEMENTS, _FEWEST_ELEMENTS = 1 << 15, 32


class Fingerprints:
    """Hashes of some elements of each tensor, as `equal_buffers.fingerprint` computes them of all.

    The elements lie at equal distances. Ranks that drift apart do so in nearly all of them.

    Args:
        tensors: dense ones. They may change afterwards.
        turn: where to begin; with other turns, other elements are read.
    """

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor], turn: int = 0) -> None:
        self._count = len(tensors)
        most = max(_MOST_ELEMENTS // max(self._count, 1), _FEWEST_ELEMENTS)
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, tensor in enumerate(tensors):
            alike.setdefault((tensor.device, tensor.dtype), []).append(place)
        self._places = list(alike.values())
        self._hashes = Transfer(
            [_hashed([_sample(tensors[place], most, turn) for place in places]) for places in self._places]
        )

    def are_ready(self) -> bool:
        """Whether the device has come so far."""
        return self._hashes.is_ready()

    def values(self) -> list[int]:
        """The hashes, in the order of the tensors; waits for the device unless `are_ready`."""
        found = [0] * self._count
        for places, hashes in zip(self._places, self._hashes.values(), strict=True):
            for place, value in zip(places, hashes, strict=True):
                found[place] = value
        return found


def is_hashable(tensor: Tensor) -> bool:
    """Whether the bits of a tensor can be read: a plain, dense one that has a memory."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return type(tensor) in (Tensor, nn.Parameter) or type(tensor.detach()) is Tensor


def _sample(tensor: Tensor, most: int, turn: int) -> Tensor:
    """Some elements, always the same number of them whatever the turn."""
    plain = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
    size = plain.numel()
    if size <= most and plain.dim() == 1:
        return plain
    step = max(-(-size // most), 1) | 1  # odd: an even one would see but some columns of most matrices
    count, first = size // step, turn % step
    if plain.is_contiguous():
        return plain.as_strided((count,), (step,), plain.storage_offset() + first)
    # flattening it would copy all of it
    places = torch.arange(first, first + count * step, step, device=plain.device)
    return plain[torch.unravel_index(places, plain.shape)]


def _hashed(samples: list[Tensor]) -> Tensor:
    """One hash for each sample. All have one type and lie on one device."""
    size = samples[0].itemsize
    if size == 1 or (size < 8 and not samples[0].is_floating_point()):
        samples = [each.view(INTEGERS[size]) for each in samples]  # not every device joins float8 and unsigned types
    bits = torch.cat(samples).view(INTEGERS[min(size, 4)])
    ends, weights = _places([len(each) * max(size // 4, 1) for each in samples], bits.device)
    # Sums modulo 2^64, so that what one sample adds is the difference of two of them.
    sums = functional.pad((bits * weights).cumsum(0), (1, 0))
    return sums[ends].diff()


def _places(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each sample ends, after a 0, and the weights of all their elements.

    A sample has the same weights wherever it lies: another rank may have other tensors before it.
    """
    weights = place_weights(device)
    if max(lengths) > len(weights):
        weights = weights.repeat(-(-max(lengths) // len(weights)))
    begun = {each: weights[:each] for each in set(lengths)}  # layers repeat, so that few lengths differ
    ends = torch.tensor([0, *itertools.accumulate(lengths)]).to(device, non_blocking=device.type == "cuda")
    return ends, torch.cat([begun[each] for each in lengths])
