"""A training in which one rank loses its connection to the store while a checkpoint is written."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from common import report
from noisy import fit
from own_sockets import own_connections

from azureml_strategy.checkpoint import writer
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.control import channel
from azureml_strategy.strategies import AzureMLDDPStrategy

loser, output = int(sys.argv[1]), Path(sys.argv[2])
LOST = 4  # step
rank = int(os.environ["RANK"])
opened: list[set[str]] = []
stage, connect = writer.stage, channel.another_connection


def connections() -> set[str]:
    """To the server of the store."""
    return {each.inode for each in own_connections() if each.ports[1] == int(os.environ["MASTER_PORT"])}


def connect_and_remember(*arguments: Any) -> Any:
    before = connections()
    store = connect(*arguments)
    opened.append(connections() - before)
    return store


def lose_connection(path: Path) -> None:
    if rank == loser and f"step={LOST}" in path.name:
        for each in own_connections():
            if each.inode in opened[0]:
                each.socket.shutdown(socket.SHUT_RDWR)


def stage_and_lose(*arguments: Any) -> Any:
    content, write = stage(*arguments)

    def write_and_lose(content: Any, path: Path, exchange: Any) -> None:
        exchange.on_all_ranks(lambda: lose_connection(path))
        write(content, path, exchange)

    return content, write_and_lose


writer.stage = stage_and_lose
channel.another_connection = connect_and_remember
checkpoint = {"monitor": None, "every_n_train_steps": 2, "keep_last": 20}
result = fit(output, strategy=AzureMLDDPStrategy(), checkpoint=checkpoint, max_epochs=1, limit_val_batches=0)
complete = [each.step for each in CheckpointFolder(output / "checkpoints").complete()]
report(rank, complete=complete, last=Path(result["last"]).name, connected=len(opened))
