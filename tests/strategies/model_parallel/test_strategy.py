from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from tests.strategies.conftest import EnterJob
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from azureml_strategy.strategies import AzureMLModelParallelStrategy
from azureml_strategy.strategies.launcher import NodeLauncher
from azureml_strategy.strategies.model_parallel.layout import MeshLayout


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        raise AssertionError("training has started")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Planned(Plain):
    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"layer": "colwise_gather_output"}

    def tensor_parallel_counts(self) -> dict[str, int]:
        return {"heads": 6}


def fit(strategy: AzureMLModelParallelStrategy, module: LightningModule) -> None:
    trainer = Trainer(accelerator="cpu", max_epochs=1, strategy=strategy, logger=False, enable_checkpointing=False)
    trainer.fit(module, DataLoader([torch.zeros(4)]))


@pytest.mark.parametrize(
    ("sizes", "module", "words"),
    [
        ({"tensor_parallel_size": 4}, Plain, "Plain does not say how to cut its layers"),
        ({"tensor_parallel_size": 8}, Planned, "does not divide the 4 process"),
        ({"tensor_parallel_size": "auto"}, Planned, "tensor_parallel_size=4, but the model has 6 heads"),
        ({"data_parallel_size": 3}, Planned, "data_parallel_size=3 times tensor_parallel_size=2 is 6, but there are 8"),
    ],
)
def test_refused_before_the_process_group(
    enter_job: EnterJob, sizes: dict[str, Any], module: type[LightningModule], words: str
) -> None:
    enter_job(2, 4)
    # Lightning's is a TypeError for a module that is not made for the strategy, and a RuntimeError for its sizes
    with pytest.raises(TypeError if module is Plain else RuntimeError, match=words) as refusal:
        fit(AzureMLModelParallelStrategy(**sizes), module())
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize(
    ("module", "expected"),
    [(Plain, (8, 1)), (Planned, (2, 4))],
)
def test_sizes_follow_the_module(
    enter_job: EnterJob, monkeypatch: pytest.MonkeyPatch, module: type[LightningModule], expected: tuple[int, int]
) -> None:
    enter_job(2, 4)
    monkeypatch.setattr(Planned, "tensor_parallel_counts", lambda self: {"heads": 8})
    strategy = AzureMLModelParallelStrategy()
    strategy.num_nodes, strategy.parallel_devices = 1, [torch.device("cpu")]
    strategy.connect(module())
    assert strategy._plan_sizes() == MeshLayout(*expected)


def test_a_module_that_says_nothing_is_sharded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a job, on one process."""
    for name, value in {"LOCAL_RANK": "0", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)  # Lightning leaves them behind

    class Alone(Plain):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

    module = Alone()
    weight, bias = (parameter.detach().clone() for parameter in module.parameters())
    with pytest.warns(UserWarning, match="Alone names no blocks"):
        fit(AzureMLModelParallelStrategy(), module)
    dist.destroy_process_group()
    assert isinstance(module.layer.weight, DTensor)
    assert isinstance(module.layer.bias, DTensor)
    assert torch.equal(module.layer.weight.to_local(), weight), "a batch of zeros gives it no gradient"
    assert torch.allclose(module.layer.bias.to_local(), (1 - 0.1 * 2 / 4) * bias)


def test_our_launcher_starts_the_others(enter_job: EnterJob) -> None:
    launch = enter_job(2, 1)
    strategy = AzureMLModelParallelStrategy(process_group_backend="gloo")
    strategy.num_nodes, strategy.parallel_devices = 1, [torch.device("cpu")] * 3
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, NodeLauncher)
    assert (strategy.launcher.num_processes, strategy.launcher.num_nodes) == (3, launch.num_nodes)
    assert strategy.process_group_backend == "gloo"
