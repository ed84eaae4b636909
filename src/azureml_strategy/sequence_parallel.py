"""Sequences shared by several ranks: each rank has a part of the tokens, and attention some of the heads.

This is Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509). All layers but attention see one token at a
time, so a rank computes them for its own part. Around attention, ranks exchange what they have: all heads of some
tokens become some heads of all tokens, and back. Any attention of one process can stand in between.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup
from torch.nn import functional
from typing_extensions import override


class SequenceGroup:
    """The ranks that compute each sequence together. Part i of a sequence, in the order of its tokens, is rank i's.

    All ranks must call its methods, with tensors of the same shapes. Gradients are right for a loss that is averaged
    over the ranks of the group, as data-parallel strategies average them.

    Args:
        group: its processes.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        # torch.compile would trace into the function and lose its gradient
        self._exchange = cast(Any, torch.compiler).disable(_Exchange.apply)

    def part(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """Return this rank's part of a tensor that has the whole sequence.

        Args:
            tensor: `(N, T, ...)`, the same on each rank.
            fill: value of the tokens that are added at the end, so that all ranks have equally many.

        Returns:
            `(N, ceil(T / ranks), ...)`.
        """
        missing = -tensor.shape[1] % self.size
        if missing:
            tensor = functional.pad(tensor, [0, 0] * (tensor.dim() - 2) + [0, missing], value=fill)
        return tensor.chunk(self.size, dim=1)[self.rank].contiguous()

    def whole(self, part: Tensor, length: int) -> Tensor:
        """Return all tokens. Each rank gives its part.

        Args:
            part: `(N, T / ranks, ...)`.
            length: tokens of the sequence, without those that `part` has added.

        Returns:
            `(N, length, ...)`, the same on each rank.
        """
        parts: Tensor = self._exchange(part.expand(self.size, *part.shape).contiguous(), self.group)
        return parts.transpose(0, 1).flatten(1, 2)[:, :length]

    def heads(self, states: Tensor) -> Tensor:
        """Exchange all heads of this rank's tokens for this rank's heads of all tokens.

        Args:
            states: `(N, H, T / ranks, D)`; the number of ranks divides H.

        Returns:
            `(N, H / ranks, T, D)`.
        """
        samples, heads, tokens, width = states.shape
        blocks = states.reshape(samples, self.size, heads // self.size, tokens, width).permute(1, 0, 2, 3, 4)
        received: Tensor = self._exchange(blocks.contiguous(), self.group)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def tokens(self, states: Tensor) -> Tensor:
        """Exchange this rank's heads of all tokens for all heads of this rank's tokens.

        Args:
            states: `(N, H / ranks, T, D)`.

        Returns:
            `(N, H, T / ranks, D)`.
        """
        samples, heads, tokens, width = states.shape
        blocks = states.reshape(samples, heads, self.size, tokens // self.size, width).permute(2, 0, 1, 3, 4)
        received: Tensor = self._exchange(blocks.contiguous(), self.group)
        return received.permute(1, 0, 2, 3, 4).flatten(1, 2)

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean over the ranks. Its gradient is that of this rank's loss: the strategy averages gradients.

        Args:
            loss: of this rank's tokens, without dimensions.
        """
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=self.group)
        return mean / self.size + (loss - loss.detach())  # equal on all ranks to the last bit: callbacks decide by it


class _Exchange(Function):
    """Sends block i to rank i. Block i of the result is rank i's."""

    @staticmethod
    @override
    def forward(ctx: Any, blocks: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    @override
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        group = cast(Any, ctx).group
        return cast(Any, _Exchange).apply(gradients[0].contiguous(), group), None
