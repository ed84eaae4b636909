"""Control stores of several ranks, which are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import HashStore, Store

from azureml_strategy.control.channel import Channel
from azureml_strategy.control.store import ControlStore


def shared(
    ranks: int,
    connections: Sequence[Any] | None = None,
    connect: Callable[[], Store | None] = lambda: None,
    name: str = "test",
) -> list[ControlStore]:
    """One store, as each rank sees it.

    Args:
        ranks: how many there are.
        connections: each rank's own; one store in memory by default.
        connect: opens another one.
        name: of its keys.
    """
    connections = connections or [HashStore()] * ranks
    channels = [Channel(each, connect) for each in connections]
    processes = [channel.id for channel in channels]
    return [
        ControlStore(channel, name, rank, processes, give_back=channel.close) for rank, channel in enumerate(channels)
    ]
