"""The collectives: how each is run, what it moves and what it must give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from azureml_strategy.network.collectives.contributions import contribution
from azureml_strategy.network.collectives.place import Place

# torch 2.13 renamed these two, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collective(ABC):
    """One collective. `total` is the message size in elements as nccl-tests counts it (doc/PERFORMANCE.md there):
    the whole tensor, where each rank holds one shard of it before or after.

    Attributes:
        name: as on the command line.
        in_place: whether the result overwrites what was sent.
        sends_shard: whether a rank sends its shard only.
        receives_shard: whether a rank receives its shard only.
    """

    name: ClassVar[str]
    in_place: ClassVar[bool] = False
    sends_shard: ClassVar[bool] = False
    receives_shard: ClassVar[bool] = False

    @abstractmethod
    def bus_factor(self, world_size: int) -> float:
        """Bus bandwidth over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md)."""

    @abstractmethod
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        """Run it once; the tensors are the same one where it works in place."""

    @abstractmethod
    def expected(self, indices: Tensor, total: int, place: Place, dtype: torch.dtype) -> Tensor:
        """What this rank must receive at these positions, in float64."""

    def buffers(self, total: int, place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tensors to send from and to receive into."""
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
    def bus_factor(self, world_size: int) -> float:
        return (world_size - 1) / world_size

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
    def bus_factor(self, world_size: int) -> float:
        return (world_size - 1) / world_size

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
    """Every rank sends each rank another shard of its tensor."""

    name = "all-to-all"

    @override
    def bus_factor(self, world_size: int) -> float:
        return (world_size - 1) / world_size

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
        # Receive first: gloo announces each receive on the connection that carries the data, and an announcement
        # behind a tensor of its own would hold the other direction up until that tensor is sent.
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
