from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from tests.strategies.conftest import EnterJob

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.strategies.launcher import NodeLauncher


def test_arguments_reach_lightnings_ddp() -> None:
    strategy = AzureMLDDPStrategy(gradient_compression="powersgd", powersgd_rank=2, bucket_cap_mb=50, static_graph=True)
    assert strategy._ddp_kwargs == {"gradient_as_bucket_view": True, "bucket_cap_mb": 50, "static_graph": True}
    assert strategy._ddp_comm_state.matrix_approximation_rank == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gradient_compression": "fp16", "ddp_comm_hook": print}, "Leave one of them out"),
        ({"gradient_compression": "fp8"}, "'fp8' is unknown"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(MisconfigurationException, match=words):
        AzureMLDDPStrategy(**arguments)


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_other_ways_to_start_processes_suit_notebooks_only(enter_job: EnterJob, start_method: Any) -> None:
    strategy = AzureMLDDPStrategy(start_method=start_method, cluster_environment=LightningEnvironment())
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, _MultiProcessingLauncher)
    enter_job(2, 1)
    with pytest.raises(LaunchError, match=f"start_method='{start_method}' in an Azure ML job"):
        AzureMLDDPStrategy(start_method=start_method)


def test_our_launcher_starts_the_others(enter_job: EnterJob) -> None:
    enter_job(2, 1)
    strategy = AzureMLDDPStrategy()
    strategy.num_nodes, strategy.parallel_devices = 1, [torch.device("cpu")] * 3
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, NodeLauncher)
    assert (strategy.launcher.num_processes, strategy.launcher.num_nodes) == (3, 2)
