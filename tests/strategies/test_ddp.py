from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from tests.strategies.conftest import EnterJob
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.strategies.changing_parameters import CompletingDDP
from azureml_strategy.strategies.compression import on_any_backend
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


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.unused = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.linear(inputs))


def _two_steps(network: nn.Module) -> None:
    for step in range(2):
        network.zero_grad()
        loss = network(torch.arange(12.0).view(4, 3).sin() + step).square().sum()
        if isinstance(network, CompletingDDP):
            network.awaits_backward = network.require_backward_grad_sync
            network.complete_after(loss)
        loss.backward()


@pytest.fixture
def _one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("static_graph", [False, True])
def test_a_single_rank_has_the_gradients_and_buffers_of_the_module_alone(static_graph: bool) -> None:
    """Once each gradient was copied into a bucket and each buffer onto itself: a third of ResNet-50's kernels."""
    ddp, alone = CompletingDDP(_Network(), gradient_as_bucket_view=True, static_graph=static_graph), _Network()
    with torch.profiler.profile() as profile:
        _two_steps(ddp)
    _two_steps(alone)
    for mine, its in zip(ddp.module.parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, its.grad)
    assert all(map(torch.equal, ddp.module.buffers(), alone.buffers()))
    names = {event.name for event in profile.events()}
    assert not any("broadcast" in name for name in names)
    assert ("c10d::allreduce_" in names) == static_graph


@pytest.mark.usefixtures("_one_rank")
def test_a_single_rank_has_no_memory_for_sending() -> None:
    """Lightning sets whether gradients are averaged after each step that optimizes manually."""
    network = nn.Linear(1000, 1000)
    with torch.profiler.profile(profile_memory=True) as profile:
        # Without the first broadcast, whose copy of the weights gloo's thread may free after the profile has ended.
        ddp = CompletingDDP(network, init_sync=False)
    assert sum(event.self_cpu_memory_usage for event in profile.key_averages()) < 1_000_000, "what is kept"
    ddp.require_backward_grad_sync = True
    assert not ddp.require_backward_grad_sync
    ddp.register_comm_hook(None, on_any_backend(bf16_compress_hook))
    assert ddp.require_backward_grad_sync
    with ddp.no_sync():
        assert not ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("accumulated", [False, True], ids=["at once", "after no_sync"])
def test_a_hook_changes_the_gradients_of_a_single_rank(accumulated: bool) -> None:
    ddp, alone = CompletingDDP(_Network()), _Network()
    if accumulated:
        with ddp.no_sync():
            pass
    ddp.register_comm_hook(None, on_any_backend(bf16_compress_hook))
    _two_steps(ddp)
    _two_steps(alone)
    assert not torch.equal(ddp.module.linear.weight.grad, alone.linear.weight.grad)
    assert torch.equal(ddp.module.linear.weight.grad, alone.linear.weight.grad.bfloat16().float())
