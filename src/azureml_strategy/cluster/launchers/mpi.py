"""Reads the variables of `distribution: {type: mpi}`: ranks from mpirun, the address from Azure Batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from azureml_strategy.cluster.environ import (
    LaunchError,
    describe,
    first_number,
    is_placeholder,
    main_address,
    main_port,
    node_count,
    required_number,
)
from azureml_strategy.cluster.launch import Launch


@dataclass(frozen=True)
class _Names:
    """The names under which one kind of mpirun sets the four numbers."""

    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]

    def all(self) -> tuple[str, ...]:
        return (self.rank, self.size, *self.local_rank, *self.local_size)


_KINDS = (
    # OMPI_COMM_WORLD_NODE_RANK is left out: despite its name, it counts within the node.
    _Names(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Names(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    # The Hydra launcher of MPICH and Intel MPI: the local numbers are MPI_LOCAL*, or PMI_LOCAL_* in some versions.
    _Names("PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
)
VARIABLES = tuple(name for kind in _KINDS for name in kind.all())


def read(environ: Mapping[str, str]) -> Launch | None:
    """Read the launch of a process that mpirun started; None if mpirun did not start it.

    Raises:
        LaunchError: mpirun's variables are incomplete, the ranks of a node are not contiguous, or no variable gives
            an address of node 0.
    """
    names = next((kind for kind in _KINDS if any(name in environ for name in kind.all())), None)
    if names is None:
        return None
    why = f"mpirun started this process ({describe(environ, [name for name in names.all() if name in environ])})"
    rank = required_number(environ, names.rank, why)
    world_size = required_number(environ, names.size, why)
    local_world_size = _local_world_size(environ, names, world_size)
    local_rank = first_number(environ, names.local_rank)
    local_rank = rank % local_world_size if local_rank is None else local_rank
    _refuse_round_robin(environ, names, rank, local_rank, local_world_size)
    num_nodes = max(world_size // local_world_size, 1)
    return Launch(
        launcher="mpi",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
        num_nodes=num_nodes,
        main_address=main_address(environ, num_nodes),
        main_port=main_port(environ, trusted=not is_placeholder(environ.get("MASTER_ADDR", ""))),
    )


def _local_world_size(environ: Mapping[str, str], names: _Names, world_size: int) -> int:
    """mpirun's own number, else the world size divided by the job's node count."""
    local_world_size = first_number(environ, names.local_size)
    nodes = node_count(environ)
    if local_world_size is None and nodes is not None:
        local_world_size = world_size // nodes
    if not local_world_size:
        raise LaunchError(
            "mpirun started this process, but how many it started on each node is not known "
            f"({describe(environ, (*names.all(), 'AZUREML_NODE_COUNT'))}), so neither is the node's rank. "
            "Use Azure ML's own launcher (`distribution: {type: mpi, process_count_per_instance: N}`) "
            "or pass the variables on with `mpirun -x`."
        )
    return local_world_size


def _refuse_round_robin(
    environ: Mapping[str, str], names: _Names, rank: int, local_rank: int, local_world_size: int
) -> None:
    if local_rank != rank % local_world_size:
        raise LaunchError(
            f"mpirun dealt the ranks out over the nodes in turn: rank {rank} has local rank {local_rank}, with "
            f"{local_world_size} processes on each node ({describe(environ, names.all())}). PyTorch needs the ranks "
            "of a node side by side. Start it with `mpirun --map-by slot`, which Azure ML does by itself."
        )
