"""Trains by Fabric under each strategy that is named, or by one process that reads all ranks' rows at once."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from common import Rows, report
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

STEPS, BATCH = 4, 4


class Model(nn.Module):
    """Sums a row; its blocks and plan are for azureml_model_parallel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(rows))).squeeze(1)

    def sharded_blocks(self) -> list[nn.Module]:
        return [self.up]

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"up": "colwise", "down": "rowwise"}


def train(strategy: Any, ranks: int, **arguments: Any) -> dict[str, Any]:
    fabric = Fabric(accelerator="cpu", strategy=strategy, **arguments)
    fabric.launch()
    model = Model()
    if strategy == "azureml_model_parallel":  # the two ways to set it up; the other is for all strategies
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
    else:
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
    replicas = (fabric.strategy.distributed_sampler_kwargs or {}).get("num_replicas") if ranks > 1 else 1
    # as many samples a step, whatever the number of replicas; `setup_dataloaders` shares them out
    batches = fabric.setup_dataloaders(DataLoader(Rows(), BATCH * WORLD // replicas))
    losses = []
    for _, (rows, _index) in zip(range(STEPS), batches, strict=False):
        loss = (model(rows) - rows.sum(dim=1)).pow(2).mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
    return {
        "losses": losses,
        "world_size": fabric.world_size,
        "strategy": type(fabric.strategy).__name__,
        "rank": fabric.global_rank,
        "check": float(fabric.all_reduce(model(Rows().rows).detach(), reduce_op="mean").sum()),
    }


def made(name: str) -> Any:
    if name == "tensor":
        from azureml_strategy.strategies.fabric import FabricModelParallelStrategy

        return FabricModelParallelStrategy(tensor_parallel_size=2)
    return DDPStrategy() if name == "stock" else name


WORLD, *names = int(sys.argv[1]), *sys.argv[2:]
results = {}
for name in names:
    numbers = {"num_nodes": 2, "devices": 2} if name == "stock" else {}
    results[name] = train(made(name), 1 if name == "auto" else WORLD, **numbers)
report(results[names[0]]["rank"], **results)
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
