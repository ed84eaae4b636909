"""The launch of a process by Azure ML: launcher, ranks, nodes and the address of rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from azureml_strategy.cluster.environ import LaunchError

_LOOPBACK = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class Launch:
    """One process's place in an Azure ML job. Ranks start at 0, and the ranks of a node are contiguous.

    Attributes:
        launcher: what started the process: `pytorch`, `mpi`, `tensorflow` or `ray` (the job's `distribution`),
            or `torchrun` or `deepspeed` if one of these was started inside the job.
        rank: global rank.
        world_size: processes in the job.
        local_rank: rank within the node.
        local_world_size: processes on each node.
        node_rank: index of the node.
        num_nodes: nodes in the job.
        main_address: host of global rank 0.
        main_port: rendezvous port on that host.

    Raises:
        LaunchError: the numbers contradict one another.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    main_address: str
    main_port: int

    def __post_init__(self) -> None:
        for broken in self._contradictions():
            raise LaunchError(
                f"The variables of the `{self.launcher}` launcher contradict one another: {broken} ({self}). "
                "Something changed them after Azure ML set them; remove what sets them in the job or the script."
            )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())

    def _contradictions(self) -> list[str]:
        checks = {
            "world_size must be num_nodes x local_world_size; nodes with different numbers of processes "
            "are not supported": self.world_size == self.num_nodes * self.local_world_size,
            "local_rank must be below local_world_size": 0 <= self.local_rank < self.local_world_size,
            "node_rank must be below num_nodes": 0 <= self.node_rank < self.num_nodes,
            "rank must be node_rank x local_world_size + local_rank": self.rank
            == self.node_rank * self.local_world_size + self.local_rank,
            "main_address (MASTER_ADDR) must name a host": bool(self.main_address),
            "main_port (MASTER_PORT) must be a TCP port": 0 < self.main_port < 65536,
        }
        return [broken for broken, holds in checks.items() if not holds]

    @property
    def separate_machines(self) -> int:
        """The number of machines. Emulated nodes share one machine and meet on its loopback interface."""
        return 1 if self.main_address.startswith(_LOOPBACK) else self.num_nodes

    def with_local_processes(self, processes: int, local_rank: int = 0) -> Launch:
        """Return the launch after each node's only process has started others, one for each device.

        Args:
            processes: processes on each node afterwards.
            local_rank: local rank of this process.
        """
        return replace(
            self,
            rank=self.node_rank * processes + local_rank,
            world_size=self.num_nodes * processes,
            local_rank=local_rank,
            local_world_size=processes,
        )


@dataclass(frozen=True)
class PartialLaunch:
    """What is known of a `Launch` without the number of nodes, which Azure ML's documented variables do not give.

    Raises:
        LaunchError: the rank is not below the world size.
    """

    rank: int
    world_size: int
    local_rank: int | None  # None if no variable gives it
    node_rank: int | None  # likewise
    main_address: str
    main_port: int

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise LaunchError(
                f"RANK={self.rank}, but WORLD_SIZE={self.world_size}: a rank must be below the number of processes. "
                "Something changed them after Azure ML set them; remove what sets them in the job or the script."
            )


class UnknownNodesError(LaunchError):
    """No variable gives the number of nodes. `learn_launch` asks the other ranks for it. `known` is the rest."""

    def __init__(self, message: str, known: PartialLaunch) -> None:
        super().__init__(message)
        self.known = known


def rank_names(ranks: Sequence[int]) -> str:
    """Return ranks in words: `rank 3`, `ranks 1, 3` or, for more than two in a row, `ranks 1 to 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
