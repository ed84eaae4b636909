"""Every collective between real processes: against data of the test's own, broken on purpose, and between pairs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import report
from torch import Tensor

from azureml_strategy.bench import collectives
from azureml_strategy.bench.collectives import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Place,
    ReduceScatter,
    SendReceive,
    check,
)
from azureml_strategy.bench.measure import Procedure, measure, measure_pairs
from azureml_strategy.cluster import detect_launch

TOTAL = 12


def inputs(total: int, world_size: int) -> Tensor:
    """What the ranks put in: a row each."""
    return torch.randint(-9, 10, (world_size, total), generator=torch.Generator().manual_seed(3)).float()


def outputs(rows: Tensor, rank: int) -> dict[str, Tensor]:
    """What the definitions of the collectives say that a rank gets, from what is in the rows of all ranks."""
    world_size, total = rows.shape
    shard = total // world_size
    own = slice(rank * shard, (rank + 1) * shard)
    return {
        "all-reduce": rows.sum(0),
        "all-gather": rows[:, :shard].flatten(),
        "reduce-scatter": rows.sum(0)[own],
        "broadcast": rows[0],
        "all-to-all": rows[:, own].flatten(),
        "send-receive": rows[rank - 1],
    }


def run(collective: Collective, place: Place) -> Tensor:
    sent, received = collective.buffers(TOTAL, place, torch.float32)
    sent.copy_(inputs(TOTAL, place.world_size)[place.rank, : sent.numel()])
    collective.run(sent, received, place)
    return received


class OneElementOff(AllReduce):
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        super().run(sent, received, place)
        if place.rank == 1:
            sent[7] += 1


class OneRankMissing(ReduceScatter):
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        if place.rank == 2:
            sent.zero_()
        super().run(sent, received, place)


class ShardsSwapped(AllGather):
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        super().run(sent, received, place)
        received.copy_(received.view(place.world_size, -1).flip(0).flatten())


class NothingSent(Broadcast):
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        """Each rank keeps what it had."""


class NothingReceived(SendReceive):
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        super().run(sent, sent.clone(), place)


def found(collective: Collective, place: Place, total: int = 300) -> list[int]:
    buffers = collective.buffers(total, place, torch.float32)
    result = check(collective, *buffers, total, place)
    return [result.checked, result.wrong]


def found_in_sample(collective: Collective, place: Place) -> list[int]:
    """The same where a sample must do: one element in three."""
    most, collectives._MOST_COMPUTED = collectives._MOST_COMPUTED, 300
    result = found(collective, place)
    collectives._MOST_COMPUTED = most
    return result


def measured(place: Place, dtype: torch.dtype) -> dict[str, Any]:
    rows = {name: measure(each, place, 1000, Procedure(dtype, 3, 1)) for name, each in COLLECTIVES.items()}
    return {name: [row.size, row.wrong, row.median_s, row.bus_bandwidth] for name, row in rows.items()}


launch = detect_launch()
assert launch is not None
dist.init_process_group(
    "gloo",
    init_method=f"tcp://{launch.main_address}:{launch.main_port}",
    rank=launch.rank,
    world_size=launch.world_size,
)
place = Place(launch.rank, launch.world_size, torch.device("cpu"))
expected = outputs(inputs(TOTAL, place.world_size), place.rank)
pairs = measure_pairs(place, launch.num_nodes, 4096, Procedure(torch.float32, 2, 1), timedelta(seconds=60))
report(
    launch.rank,
    right={name: torch.equal(run(each, place), expected[name]) for name, each in COLLECTIVES.items()},
    checks={name: found(each, place) for name, each in COLLECTIVES.items()},
    samples={name: found_in_sample(each, place) for name, each in COLLECTIVES.items()},
    broken={
        type(each).__name__: found(each, place)
        for each in (OneElementOff(), OneRankMissing(), ShardsSwapped(), NothingSent(), NothingReceived())
    },
    broken_sample=found_in_sample(NothingSent(), place),
    measured={str(dtype): measured(place, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    extremes=[place.highest([launch.rank]), place.lowest([launch.rank]), place.total([launch.rank])],
    pairs=[[*pair, bandwidth] for pair, bandwidth in pairs.bus_bandwidth.items()],
    wrong_pairs=pairs.wrong,
)
dist.destroy_process_group()
