"""What `self.log` collects under our strategies: the same values as stock Lightning's, at less of the host's time."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector import result
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.strategies.process_group import end_process_group
from azureml_strategy.strategies.reduction import reduce_over_ranks


class Logging(LightningModule):
    """Logs in each of the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = torch.nn.Linear(4, 1), MeanMetric()
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).pow(2).mean()
        self.mean.update(loss.detach())
        self.log("step", loss, on_step=True)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("sum", loss, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=3)
        self.log("graph", loss, on_step=True, on_epoch=True, enable_graph=True)
        self.log("number", batch_idx, on_step=True, on_epoch=True, prog_bar=True)
        self.log("metric", self.mean, on_step=True, on_epoch=True)
        self.log_dict({"some": loss * 2, "others": loss.double()}, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val", self.layer(batch[0]).mean(), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def logged(strategy: Any) -> tuple[list[dict[str, float]], int]:
    """Return what was logged in two fits of a Trainer, and how often a value was moved."""
    torch.manual_seed(1)
    module, inputs = Logging(), torch.randn(10, 4)
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False},
        strategy=strategy,
    )
    moved = 0
    own = result.apply_to_collection

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal moved
        moved += 1
        return own(*args, **kwargs)

    with patch.dict(os.environ), patch.object(result, "apply_to_collection", count):
        for _ in range(2):
            trainer.fit(module, DataLoader(TensorDataset(inputs), 4), DataLoader(TensorDataset(inputs), 4))
            trainer.fit_loop.max_epochs += 1
    module.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    return module.seen, moved


def test_values_are_those_of_stock_lightning_and_are_not_moved_in_each_step() -> None:
    stock, often = logged("auto")
    ours, seldom = logged(AzureMLDDPStrategy(process_group_backend="gloo"))
    end_process_group()
    assert ours == stock
    assert len(ours) == 10
    assert seldom < often / 2, "a logged metric is, and so are values of validation"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("operation", ["mean", "sum", "max", dist.ReduceOp.AVG])
def test_one_rank_sends_nothing(dtype: torch.dtype, operation: Any) -> None:
    value = torch.tensor([1, 0, 1]).to(dtype)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with patch("torch.distributed.all_reduce", side_effect=AssertionError("sent")):
        found = reduce_over_ranks(value.clone(), reduce_op=operation)
    dist.destroy_process_group()
    assert found.tolist() == value.tolist()
    growing = operation == "sum" and not dtype.is_floating_point
    assert found.dtype == (torch.int64 if growing else found.dtype)
