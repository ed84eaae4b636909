"""A plain Fabric script: a small network learns a function of eight numbers.

It knows nothing of nodes. `python train.py` runs it on a laptop. In an Azure ML job with a `distribution` block, the
same line trains on all processes of all nodes.
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, FEATURES = 1024, 8


def data() -> TensorDataset:
    """Return the same rows on each rank; `fabric.setup_dataloaders` gives each its share."""
    rows = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(rows, rows.sum(dim=1).sin())


def main() -> None:
    """Train, and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp", help="a name of Fabric's, or one that begins with azureml_")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a step, over all processes")
    parser.add_argument("--lr", type=float, default=0.05)
    arguments = parser.parse_args()

    fabric = Fabric(strategy=arguments.strategy)
    fabric.launch()
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=arguments.lr))
    loader = fabric.setup_dataloaders(DataLoader(data(), arguments.batch_size // fabric.world_size))

    step = 0
    while step < arguments.steps:
        for rows, targets in loader:
            loss = nn.functional.mse_loss(model(rows).squeeze(1), targets)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            step += 1
            if step == arguments.steps:
                break
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    if fabric.is_global_zero:  # fabric.print would print once on each node
        print(f"{step} steps by {fabric.world_size} process(es), final loss {float(mean):.6f}")


if __name__ == "__main__":
    main()
