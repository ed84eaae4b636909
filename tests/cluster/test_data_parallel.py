from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler, DataLoader

from azureml_strategy.cluster.data_parallel import batch_size_of, data_parallel_size
from azureml_strategy.cluster.environment import AzureMLEnvironment
from azureml_strategy.cluster.launch import Launch

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


def test_one_device_reads_everything() -> None:
    assert data_parallel_size(Trainer(devices=1, **QUIET)) == 1


@pytest.mark.parametrize(("nodes", "processes"), [(1, 2), (2, 4)])
def test_every_rank_of_ddp_reads_its_own(nodes: int, processes: int) -> None:
    launch = Launch("pytorch", 0, nodes * processes, 0, processes, 0, nodes, "10.0.0.4", 6105)
    trainer = Trainer(strategy="ddp", plugins=[AzureMLEnvironment(launch)], num_nodes=nodes, devices=processes, **QUIET)
    assert data_parallel_size(trainer) == nodes * processes


@pytest.mark.parametrize(
    ("loader", "size"),
    [
        (DataLoader(range(8), batch_size=4), 4),
        (DataLoader(range(8), batch_sampler=BatchSampler(range(8), 3, drop_last=False)), 3),
        (DataLoader(range(8), batch_size=None), None),
        ([DataLoader(range(8), batch_size=4)], None),
        (None, None),
    ],
)
def test_the_batch_size_that_a_loader_says(loader: Any, size: int | None) -> None:
    assert batch_size_of(loader) == size
