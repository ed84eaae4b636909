"""A process group of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from azureml_strategy.network.collectives import Place


@pytest.fixture
def alone() -> Iterator[Place]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Place(0, 1, torch.device("cpu"))
    dist.destroy_process_group()
