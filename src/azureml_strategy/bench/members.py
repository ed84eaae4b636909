"""Joins the job's processes in a process group for the benchmark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from azureml_strategy.bench.collectives import Place
from azureml_strategy.bench.options import BenchError
from azureml_strategy.cluster import Launch, learn_launch
from azureml_strategy.network.session import NetworkSession, prepare_network

# Largest share of a device's memory for one message: most collectives need a second buffer as large.
_SHARE = 0.4


@dataclass(frozen=True)
class Member:
    """This process in the job's process group.

    Attributes:
        launch: its place in the job.
        place: its place in the group, and its device.
        backend: backend of the group.
        session: the network setup of the group.
    """

    launch: Launch
    place: Place
    backend: str
    session: NetworkSession

    @property
    def idle_gpus(self) -> int:
        """GPUs of this node that no process of the job uses."""
        used = self.launch.local_world_size
        return max(0, torch.cuda.device_count() - used) if self.backend == "nccl" else 0

    def largest_message(self) -> int:
        """Return the bytes of the largest message that fits on every process's device. Every process must call it."""
        if self.place.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.place.device)
        else:
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // self.launch.local_world_size
        return int(self.place.lowest([_SHARE * free])[0])


def require_launch() -> Launch:
    """Return this process's place in the job.

    Raises:
        BenchError: this is not a process of a job, or the job has only one process.
        LaunchError: the job's variables cannot be trusted.
    """
    launch = learn_launch()
    if launch is None or launch.world_size == 1:
        found = "this is no process of a job" if launch is None else "this job has one process"
        raise BenchError(
            f"bench measures what the processes of a job send one another, and {found}. Make it the command of a job "
            "with several processes, or try it here: azureml-strategy emulate --nodes 2 -- azureml-strategy bench"
        )
    return launch


@contextmanager
def join(launch: Launch, backend: str | None, timeout: timedelta) -> Iterator[Member]:
    """Start the process group of the job, and destroy it at the end of the block.

    Args:
        launch: this process's place in the job.
        backend: `nccl` or `gloo`; by default NCCL if there is a GPU, else gloo.
        timeout: limit for the other processes to join, and for each collective.

    Yields:
        This process in the group.

    Raises:
        BenchError: this process has no GPU, and NCCL needs one.
        LaunchError: processes are missing.
    """
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _cuda_device(launch) if backend == "nccl" else torch.device("cpu")
    session = prepare_network(launch, backend, timeout)
    dist.init_process_group(
        backend,
        init_method=f"tcp://{launch.main_address}:{launch.main_port}",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )
    try:
        yield Member(launch, Place(launch.rank, launch.world_size, device), backend, session)
    finally:
        dist.destroy_process_group()


def _cuda_device(launch: Launch) -> torch.device:
    visible = torch.cuda.device_count()
    # A launcher may show each process only its own GPU.
    index = 0 if visible == 1 else launch.local_rank
    if index >= visible:
        raise BenchError(
            f"Process {launch.local_rank} of this node has no GPU of its own: {visible} can be seen here. Start as "
            "many processes as a node has GPUs (process_count_per_instance), or measure with --backend gloo."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
