"""Hashes of many tensors in a few kernels, read without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from azureml_strategy.strategies.equal_buffers import INTEGERS, place_weights

# Of all tensors together, about so many elements are read, spread over each; of each at least so many.
_MOST_ELEMENTS, _FEWEST_ELEMENTS = 1 << 16, 32


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
        self._hashes: list[tuple[list[int], Tensor]] = []
        self._events: list[torch.cuda.Event] = []
        most = max(_MOST_ELEMENTS // max(self._count, 1), _FEWEST_ELEMENTS)
        by_device: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(place)
        for device, places in by_device.items():
            hashes = _hashed([_sample(tensors[place], most, turn) for place in places])
            self._hashes.append((places, hashes.to("cpu", non_blocking=True)))
            if device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)

    def are_ready(self) -> bool:
        """Whether the device has come so far."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def values(self) -> list[int]:
        """The hashes, in the order of the tensors; waits for the device unless `are_ready`."""
        for event in self._events:
            event.synchronize()
        found = [0] * self._count
        for places, hashes in self._hashes:
            for place, value in zip(places, hashes.tolist(), strict=True):
                found[place] = value
        return found


def is_hashable(tensor: Tensor) -> bool:
    """Whether the bits of a tensor can be read: a plain, dense one that has a memory."""
    dense = not tensor.is_meta and tensor.layout == torch.strided and not tensor.is_quantized
    return dense and type(tensor.detach()) is Tensor


def _sample(tensor: Tensor, most: int, turn: int) -> Tensor:
    """Some elements as integers, always the same number of them whatever the turn."""
    plain = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
    step = max(-(-plain.numel() // most), 1) | 1  # odd: an even one would see but some columns of most matrices
    count, first = plain.numel() // step, turn % step
    if plain.is_contiguous():
        taken = plain.as_strided((count,), (step,), plain.storage_offset() + first)
    else:  # flattening it would copy all of it
        places = torch.arange(first, first + count * step, step, device=plain.device)
        taken = plain[torch.unravel_index(places, plain.shape)]
    if taken.itemsize <= 4:
        return taken.view(INTEGERS[taken.itemsize])
    return taken.contiguous().view(torch.int32)


def _hashed(samples: list[Tensor]) -> Tensor:
    ends, weights = _places([len(each) for each in samples], samples[0].device)
    # Sums modulo 2^64, so that what one sample adds is the difference of two of them.
    sums = functional.pad((torch.cat(samples) * weights).cumsum(0), (1, 0))
    return sums[ends].diff()


def _places(lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each sample ends, after a 0, and the weights of all their elements.

    A sample has the same weights wherever it lies: another rank may have other tensors before it.
    """
    total, weights = sum(lengths), place_weights(device)
    sizes = torch.tensor(lengths).to(device, non_blocking=True)
    ends = functional.pad(sizes.cumsum(0), (1, 0))
    begins = ends[:-1].repeat_interleave(sizes, output_size=total)
    return ends, weights[(torch.arange(total, device=device) - begins) % len(weights)]
