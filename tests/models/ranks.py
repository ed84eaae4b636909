"""Ranks of stock Lightning, started as torchrun starts them, outside any job."""

from __future__ import annotations

import os
from pathlib import Path

from tests.emulated import SHARED_MACHINE, free_port
from tests.preloaded import Forked


def start_ranks(script: Path, *arguments: object, ranks: int) -> list[Forked]:
    """Start a script as each rank of one node."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none"}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    shared = {**os.environ, **SHARED_MACHINE, **meeting, **sizes}
    command = [str(script), *map(str, arguments)]
    return [Forked(command, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True) for rank in range(ranks)]


def wait_for(processes: list[Forked], timeout: float) -> None:
    for process in processes:
        output, _ = process.communicate(timeout)
        assert process.returncode == 0, output
