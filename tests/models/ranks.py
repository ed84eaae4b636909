"""Ranks of stock Lightning, started as torchrun starts them, outside any job."""

from __future__ import annotations

import os
from pathlib import Path

from tests.emulated import SHARED_MACHINE
from tests.preloaded import Forked

from azureml_strategy.emulator.nodes import reserved_port


def run_ranks(script: Path, *arguments: object, ranks: int, timeout: float) -> None:
    """Run a script as each rank of one node, to its end."""
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    with reserved_port(0) as port:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared = {**os.environ, **SHARED_MACHINE, **meeting, **sizes}
        each = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        processes = [Forked([str(script), *map(str, arguments)], environ, text=True) for environ in each]
        for process in processes:
            wait_for(process, timeout)


def wait_for(process: Forked, timeout: float) -> None:
    output, _ = process.communicate(timeout)
    assert process.returncode == 0, output
