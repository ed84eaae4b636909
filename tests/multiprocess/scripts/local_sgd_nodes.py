"""Nodes that train by themselves: two ranks of a node are one replica that reads what both read.

Argument: how many processes a node has. With one, it reads what two would.
"""

from __future__ import annotations

import os
import sys

import torch
from common import Rows, quiet_trainer, report
from replicas import Notes, Replica
from torch.utils.data import DataLoader

from azureml_strategy.strategies import AzureMLLocalSGDStrategy

BATCH, STEPS = 4, 8


def batches(node: int, ranks: list[int]) -> list[list[int]]:
    """Rows of each batch, of one rank of the node or of both in one."""
    at = [node * 32 + step * 4 for step in range(STEPS)]
    return [[start + 2 * rank + row for rank in ranks for row in range(2)] for start in at]


processes, rank = int(sys.argv[1]), int(os.environ["RANK"])
node, local = divmod(rank, processes)
plan = batches(node, [local] if processes == 2 else [0, 1])
rules = {
    "plain": {},
    "diloco": {"outer_learning_rate": 0.7, "fragments": 2, "delay": 1},
    "int8": {"compression": "int8"},
}
results = {}
for name, given in rules.items():
    notes = Notes()
    strategy = AzureMLLocalSGDStrategy(period=6, replica="node" if name == "plain" else "auto", warmup_steps=3, **given)
    trainer = quiet_trainer(
        strategy=strategy,
        max_epochs=3,
        callbacks=[notes],
        use_distributed_sampler=False,
        gradient_clip_val=0.5,
    )
    module = Replica(optimizer=torch.optim.AdamW, learning_rate=0.02)
    trainer.fit(module, DataLoader(Rows(), batch_sampler=plan))
    results[name] = {"weights": notes.weights, "read": notes.read}
report(rank, **results)
torch.distributed.destroy_process_group()
