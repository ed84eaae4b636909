"""Places in a job, as variables of this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables
from azureml_strategy.cluster.launch import Launch

EnterJob = Callable[..., Launch]


@pytest.fixture
def enter_job(monkeypatch: pytest.MonkeyPatch) -> EnterJob:
    """Be the last process of a job of so many nodes and processes."""

    def enter(nodes: int, processes: int, distribution: str = "pytorch") -> Launch:
        world_size, addresses = nodes * processes, [f"10.0.0.{4 + node}" for node in range(nodes)]
        places = (world_size - 1, world_size, processes - 1, processes, nodes - 1, nodes)
        launch = Launch(distribution, *places, addresses[0], 6105)
        run = EmulatedRun("quirky_plum", "tests", "1", "sqlite:///mlflow.db")
        for name, value in azure_variables(launch, distribution, addresses, run).items():
            monkeypatch.setenv(name, value)
        return launch

    return enter
