"""Cuts the parameters into fragments, each of which is exchanged as one flat tensor.

For each it keeps the common parameters, the outer optimizer and the compression.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD

from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.local_sgd.exchange import Compression, Exchanges
from azureml_strategy.strategies.local_sgd.period import Rules

# 32 MiB in float32. It is small enough that one part is sent while the next is copied, and large enough that the
# network's latency does not matter.
_MOST_ELEMENTS = 2**23


@dataclass(frozen=True)
class Piece:
    """The elements `start` to `stop` of a flattened tensor, which has the given name in the module."""

    name: str
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of the elements; flat unless they are the whole tensor."""
        whole = self.start == 0 and self.stop == tensor.numel()
        return tensor if whole else tensor.view(-1)[self.start : self.stop]


class Fragment:
    """Pieces that are exchanged together, as one flat tensor.

    Args:
        pieces: in the order of the flat tensor.
        dtype: of the flat tensor.
    """

    def __init__(self, pieces: Iterable[Piece], dtype: torch.dtype) -> None:
        self.pieces = tuple(pieces)
        self._sizes = [each.stop - each.start for each in self.pieces]
        self.size = sum(self._sizes)
        self.dtype = dtype

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a flat copy of the pieces."""
        parts = [each.of(tensors[each.name].detach()).reshape(-1).to(self.dtype) for each in self.pieces]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    @torch.no_grad()
    def write(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy the elements of a flat tensor into the pieces."""
        for piece, values in zip(self.pieces, torch.split(flat, self._sizes), strict=True):
            target = piece.of(tensors[piece.name].detach())
            target.copy_(values.view(target.shape))


def cut(tensors: Mapping[str, Tensor], parts: int, dtype: torch.dtype | None = None) -> list[Fragment]:
    """Cut tensors into parts with equally many elements.

    A tensor whose elements are not in order in memory, such as a convolution in channels_last, is not cut: it goes to
    the part that most of it belongs to. So parts can differ, and one can be empty.

    Args:
        tensors: by name, in the order of the parts; on all ranks the same.
        parts: how many.
        dtype: of the flat tensors; None for float32, or float64 if one of the tensors is.
    """
    if dtype is None:
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
    """Return the parameters that are trained, by name, a tied one once; refuse one that cannot be averaged."""
    found: dict[str, Tensor] = {name: each for name, each in module.named_parameters() if each.requires_grad}
    for name, each in found.items():
        if not each.is_floating_point() or each.layout is not torch.strided:
            raise ConfigurationError(
                f"{name} is {each.dtype} ({each.layout}), which local SGD cannot average. Use azureml_ddp, or keep it "
                "as a dense tensor of real numbers."
            )
    return found


def statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that replicas average, such as BatchNorm's running statistics: real numbers that are saved."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, layer in module.named_modules()
        for name, buffer in layer.named_buffers(recurse=False)
        if buffer.is_floating_point() and name not in layer._non_persistent_buffers_set
    }


@dataclass
class Part:
    """A fragment of the parameters, or a share of a large fragment, which is exchanged at once; and its state.

    Attributes:
        fragment: its pieces of tensors.
        anchor: the common parameters after the last exchange, flat; None if parameters are sent, and not changes.
        outer: the optimizer that applies the average of the changes to the anchor.
        compression: of the changes, with what it has not sent yet.
    """

    fragment: Fragment
    anchor: Tensor | None = None
    outer: SGD | None = None
    compression: Compression | None = None

    @property
    def momentum(self) -> Tensor | None:
        """The momentum of the outer optimizer, flat; None before its first step, and without such an optimizer."""
        if self.outer is None or self.anchor is None:
            return None
        momentum: Tensor | None = self.outer.state[self.anchor].get("momentum_buffer")
        return momentum

    def to_send(self, local: Tensor, in_place: bool) -> Tensor:
        """Return the tensor to average: the parameters, or how they have changed.

        Args:
            local: this replica's parameters, flat.
            in_place: whether the result may overwrite `local`.
        """
        if self.anchor is None:
            return local if in_place else local.clone()
        return torch.sub(self.anchor, local, out=local if in_place else None)

    def mean(self, sent: Tensor, exchanges: Exchanges) -> Tensor:
        """Average the tensors of all ranks. Called on the thread of the exchanges."""
        return exchanges.mean(sent) if self.compression is None else self.compression.mean(sent, exchanges)

    def common(self, average: Tensor) -> Tensor:
        """Return the common parameters after an exchange, flat, from the average of the tensors that ranks have sent.

        A change is the old parameters minus the new ones, so that it can serve as a gradient.
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
        rules: how many parts, and what state each has.
        anchors: common parameters so far, by name; a missing one is as the parameter is now.
        momenta: of the outer optimizer so far, by name; a missing one is zero.
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
    """Return flat tensors of parts as tensors in the shapes of the parameters, on the host."""
    if not flats:
        return {}
    # Zeros, as a part may have no momentum before its first exchange.
    named = {name: torch.zeros(each.shape, dtype=flats[0][1].dtype) for name, each in shared.items()}
    for part, flat in flats:
        part.fragment.write(flat.cpu(), named)
    return named
