"""The collective operations: what each rank sends, what it must receive, and the factor to bus bandwidth."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

# Odd 64-bit multipliers (of Knuth's MMIX generator, and 2^64 over the golden ratio). With only one multiplication, two
# ranks would differ by a constant, which may be 0; the shift and the second multiplication mix the bits.
_INDEX_STEP, _RANK_STEP = 6364136223846793005, -7046029254386353131
_LARGEST = 120
# Elements computed at once: the intermediates, 2 MB each, fit into a core's cache (0.4 s for 2^24 elements; 2 s if they
# do not fit).
BLOCK = 1 << 18
# Most elements times ranks that are recomputed to check one result: this takes two seconds of one core.
_MOST_COMPUTED = 1 << 26
# torch 2.13 renamed these two functions, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Place:
    """One process of a process group, and the device of its tensors. The group None has all processes of the job."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait until every process of the group has called this and its device is idle."""
        # torch's own `barrier` needs the device as an argument, and does not wait until the device is idle.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.synchronize()

    def highest(self, values: Sequence[float]) -> list[float]:
        """Return the highest value over the processes, at each position."""
        return self._combine(values, dist.ReduceOp.MAX)

    def lowest(self, values: Sequence[float]) -> list[float]:
        """Return the lowest value over the processes, at each position."""
        return self._combine(values, dist.ReduceOp.MIN)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum over the processes, at each position."""
        return self._combine(values, dist.ReduceOp.SUM)

    def _combine(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        combined = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(combined, op=operation, group=self.group)
        return [*combined.tolist()]


def contribution(rank: int | Tensor, indices: Tensor, world_size: int, dtype: torch.dtype) -> Tensor:
    """Return the elements that a rank contributes, in float64.

    They are small whole numbers, so the sum over all ranks is exact in the data type, in whatever order a library adds.
    A result that differs at all is wrong, and no tolerance for rounding is needed. (If there are more ranks than the
    type's exact range, 256 in bfloat16, the elements are -1, 0 and 1. The sum of 1024 of these leaves the range with a
    probability of 1e-21.) `indices` are positions in the rank's tensor, int64; `rank` may be a tensor with the rank for
    each of them.
    """
    exact = int(2 / torch.finfo(dtype).eps)
    largest = max(1, min(_LARGEST, exact // world_size))
    rank_number = torch.as_tensor(rank, device=indices.device) + 1  # a tensor, so that the product wraps around
    mixed = indices * _INDEX_STEP + rank_number * _RANK_STEP
    spread = ((mixed ^ (mixed >> 32)) * _INDEX_STEP) >> 40  # 24 bits, with sign
    return (((spread + (1 << 23)) * (2 * largest + 1) >> 24) - largest).double()


def fill(tensor: Tensor, rank: int, world_size: int) -> None:
    """Overwrite a tensor with the contribution of a rank."""
    for start in range(0, tensor.numel(), BLOCK):
        part = tensor[start : start + BLOCK]
        indices = torch.arange(start, start + part.numel(), device=tensor.device)
        part.copy_(contribution(rank, indices, world_size, tensor.dtype))


@dataclass(frozen=True)
class Check:
    """How many elements of a result were compared on each rank, and how many were wrong on the rank with the most."""

    checked: int
    wrong: int


def check(collective: Collective, sent: torch.Tensor, received: torch.Tensor, total: int, place: Place) -> Check:
    """Run a collective once, and compare its result with the expected sum or copy in float64.

    Up to 64 Mi elements times ranks, every element is compared; above that, evenly spaced elements. `sent` and
    `received`, from `Collective.buffers`, are overwritten. `total` is the message size in elements.
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


class Collective(ABC):
    """A collective operation.

    `total` is the message size in elements as nccl-tests counts it (doc/PERFORMANCE.md there): the size of the whole
    tensor, of which each rank may hold one shard before or after. In place, the result overwrites the tensor that was
    sent.
    """

    name: ClassVar[str]
    in_place: ClassVar[bool] = False
    sends_shard: ClassVar[bool] = False
    receives_shard: ClassVar[bool] = False

    def bus_factor(self, world_size: int) -> float:
        """Return the ratio of bus bandwidth to algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md).

        By default, each rank sends its shards to all others once.
        """
        return (world_size - 1) / world_size

    @abstractmethod
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        """Run the collective once; if it works in place, both arguments are the same tensor."""

    @abstractmethod
    def expected(self, indices: Tensor, total: int, place: Place, dtype: torch.dtype) -> Tensor:
        """Return what this rank must receive at these positions, in float64."""

    def buffers(self, total: int, place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the tensors to send from and to receive into."""
        shard = total // place.world_size
        sent = torch.zeros(shard if self.sends_shard else total, dtype=dtype, device=place.device)
        if self.in_place:
            return sent, sent
        return sent, sent.new_zeros(shard if self.receives_shard else total)


class AllReduce(Collective):
    """Every rank gets the sum of all ranks' tensors."""

    name = "all-reduce"
    in_place = True

    @override
    def bus_factor(self, world_size: int) -> float:
        return 2 * (world_size - 1) / world_size

    @override
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        dist.all_reduce(sent, group=place.group)

    @override
    def expected(self, indices: Tensor, total: int, place: Place, dtype: torch.dtype) -> Tensor:
        return _sum(indices, place, dtype)


class AllGather(Collective):
    """Every rank gets all ranks' shards."""

    name = "all-gather"
    sends_shard = True

    @override
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        _all_gather(received, sent, group=place.group)

    @override
    def expected(self, indices: Tensor, total: int, place: Place, dtype: torch.dtype) -> Tensor:
        shard = total // place.world_size
        return contribution(indices // shard, indices % shard, place.world_size, dtype)


class ReduceScatter(Collective):
    """Every rank gets its shard of the sum."""

    name = "reduce-scatter"
    receives_shard = True

    @override
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        _reduce_scatter(received, sent, group=place.group)

    @override
    def expected(self, indices: Tensor, total: int, place: Place, dtype: torch.dtype) -> Tensor:
        return _sum(indices + place.rank * (total // place.world_size), place, dtype)


class Broadcast(Collective):
    """Every rank gets rank 0's tensor."""

    name = "broadcast"
    in_place = True

    @override
    def bus_factor(self, world_size: int) -> float:
        return 1.0

    @override
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        dist.broadcast(sent, group=place.group, group_src=0)

    @override
    def expected(self, indices: Tensor, total: int, place: Place, dtype: torch.dtype) -> Tensor:
        return contribution(0, indices, place.world_size, dtype)


class AllToAll(Collective):
    """Every rank sends a different shard of its tensor to each rank."""

    name = "all-to-all"

    @override
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        dist.all_to_all_single(received, sent, group=place.group)

    @override
    def expected(self, indices: Tensor, total: int, place: Place, dtype: torch.dtype) -> Tensor:
        shard = total // place.world_size
        return contribution(indices // shard, indices % shard + place.rank * shard, place.world_size, dtype)


class SendReceive(Collective):
    """Every rank sends its tensor to the next one and receives the previous one's, at the same time."""

    name = "send-receive"

    @override
    def bus_factor(self, world_size: int) -> float:
        return 1.0

    @override
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        following, previous = (place.rank + 1) % place.world_size, (place.rank - 1) % place.world_size
        # Receive first: gloo announces each receive on the connection that carries the data. If the announcement came
        # after this rank's own tensor, the other direction would wait until that tensor is sent.
        operations = [
            dist.P2POp(dist.irecv, received, group=place.group, group_peer=previous),
            dist.P2POp(dist.isend, sent, group=place.group, group_peer=following),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    @override
    def expected(self, indices: Tensor, total: int, place: Place, dtype: torch.dtype) -> Tensor:
        return contribution((place.rank - 1) % place.world_size, indices, place.world_size, dtype)


COLLECTIVES: dict[str, Collective] = {
    each.name: each for each in (AllReduce(), AllGather(), ReduceScatter(), Broadcast(), AllToAll(), SendReceive())
}


def _sum(indices: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
    parts = (contribution(rank, indices, place.world_size, dtype) for rank in range(place.world_size))
    return sum(parts, start=torch.zeros_like(indices, dtype=torch.float64))
