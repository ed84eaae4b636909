"""Environments of jobs, package versions, and the facts of a tree of files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.network.doctor.facts import Facts, read_facts

RUN = EmulatedRun("quirky_plum", "resnet50", "1", "azureml://eastus.api.azureml.ms/mlflow/v1.0/subscriptions/s-u-b/x")
VERSIONS: Mapping[str, str | None] = {
    "python": "3.11.7",
    "azureml-strategy": "0.1.0",
    "torch": "2.13.0",
    "cuda": "12.8.90",
    "nccl": "2.27.5",
    "lightning": "2.6.6",
    "deepspeed": None,
    "mlflow": "3.15.2",
    "azureml-mlflow": "1.60.0",
}


def variables(vm_size: str | None = None, nodes: int = 2, processes: int = 1, address: str = "10.0.0.4") -> Any:
    """What Azure ML gives global rank 0 of a job on nodes of this size."""
    launch = Launch("pytorch", 0, nodes * processes, 0, processes, 0, nodes, address, 6105)
    context = {"vm_size": vm_size, "vm_priority": "Dedicated", "run_attempt_count": 0}
    addresses = [f"10.0.0.{4 + node}" for node in range(nodes)]
    return {
        **azure_variables(launch, "pytorch", addresses, RUN),
        "AZUREML_CR_COMPUTE_CONTEXT": json.dumps(context),
        "HOME": "/nonexistent",
    }


@pytest.fixture
def job() -> Callable[..., dict[str, str]]:
    """Makes the environment of a job: of what size, how many nodes and processes on each."""
    return variables


@pytest.fixture
def versions() -> dict[str, str | None]:
    """Packages that go together."""
    return dict(VERSIONS)


@pytest.fixture
def read(tree: Any) -> Callable[..., Facts]:
    """Reads the facts of the tree, with an environment and with versions that differ from the good ones."""

    def facts(environ: Mapping[str, str] | None = None, **versions: str | None) -> Facts:
        return read_facts(tree.root, environ or {}, {**VERSIONS, **versions})

    return facts
