"""Cuts the tensors of a module into parts of equal size, each of which is exchanged as one flat tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from azureml_strategy.strategies.errors import ConfigurationError


@dataclass(frozen=True)
class Piece:
    """Some elements of a tensor.

    Attributes:
        name: of the tensor in the module.
        start: index of the first element in the flat tensor.
        stop: index after the last one.
    """

    name: str
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the elements, flat where they are but a part of the tensor; they share its memory."""
        whole = self.start == 0 and self.stop == tensor.numel()
        return tensor if whole else tensor.view(-1)[self.start : self.stop]


class Fragment:
    """Pieces that are exchanged together, as one flat tensor.

    Args:
        pieces: in the order of the flat tensor.
        dtype: of the flat tensor: float32, or float64 if one of the tensors is.
    """

    def __init__(self, pieces: Iterable[Piece], dtype: torch.dtype) -> None:
        self.pieces = tuple(pieces)
        self.size = sum(each.stop - each.start for each in self.pieces)
        self.dtype = dtype

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a flat copy of the pieces."""
        parts = [each.of(tensors[each.name].detach()).reshape(-1).to(self.dtype) for each in self.pieces]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    @torch.no_grad()
    def write(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy the elements of a flat tensor into the pieces."""
        sizes = [each.stop - each.start for each in self.pieces]
        for piece, values in zip(self.pieces, torch.split(flat, sizes), strict=True):
            target = piece.of(tensors[piece.name].detach())
            target.copy_(values.view(target.shape))


def cut(tensors: Mapping[str, Tensor], parts: int) -> list[Fragment]:
    """Cut tensors into parts with equally many elements.

    A tensor whose elements are not in order in memory, such as a convolution in channels_last, is not cut: it goes to
    the part that most of it belongs to. So parts can differ, and one can be empty.

    Args:
        tensors: by name, in the order of the parts; on all ranks the same.
        parts: how many.
    """
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in tensors.values()) else torch.float32
    total = sum(each.numel() for each in tensors.values())
    bounds = [total * part // parts for part in range(parts + 1)]
    pieces: list[list[Piece]] = [[] for _ in range(parts)]
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel()
        middle = offset + size // 2
        for part, (low, high) in enumerate(itertools.pairwise(bounds)):
            start, stop = max(0, low - offset), min(size, high - offset)
            if not tensor.is_contiguous():
                start, stop = (0, size) if low <= middle < high else (0, 0)
            if start < stop:
                pieces[part].append(Piece(name, start, stop))
        offset += size
    return [Fragment(each, dtype) for each in pieces]


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name; a tied one once.

    Raises:
        ConfigurationError: one of them cannot be averaged.
    """
    found: dict[str, Tensor] = {name: each for name, each in module.named_parameters() if each.requires_grad}
    for name, each in found.items():
        if not each.is_floating_point() or each.layout is not torch.strided:
            raise ConfigurationError(
                f"{name} is {each.dtype} ({each.layout}), which local SGD cannot average. Use azureml_ddp, or keep it "
                "as a dense tensor of real numbers."
            )
    return found


def statistics(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that replicas average, such as BatchNorm's running statistics: real numbers that are saved."""
    found = {}
    for path, layer in module.named_modules():
        for name, buffer in layer.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in layer._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found
