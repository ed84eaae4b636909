"""Trainings whose weights, after every step of every replica, an oracle in one process computes too."""

from __future__ import annotations

from typing import Any

import torch
from replicas import Case

CLIPPED = {"gradient_clip_val": 0.5}
ADAMW: dict[str, Any] = {"optimizer": torch.optim.AdamW, "learning_rate": 0.02, "schedule": 5}
OUTER: dict[str, Any] = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}

# What the oracle repeats: arguments that it does not know are not here.
CASES: dict[str, Case] = {
    "plain": Case({"period": 5}),
    "adamw clipped scheduled": Case({"period": 5}, CLIPPED, ADAMW),
    "accumulation": Case({"period": 3}, {"accumulate_grad_batches": 3}, ADAMW),
    "uneven last batches": Case({"period": 5}, batch_size=5, rows=63),
    "warm-up": Case({"period": 4, "warmup_steps": 6}, {}, ADAMW),
    "diloco": Case({"period": 5, **OUTER}, CLIPPED, ADAMW),
    "diloco after warm-up": Case({"period": 4, "warmup_steps": 6, **OUTER}, {}, ADAMW),
    "fragments": Case({"period": 6, "fragments": 3, **OUTER}, {}, ADAMW),
    "fragments and delay": Case({"period": 6, "fragments": 3, "delay": 1, **OUTER}, {}, ADAMW),
    "longest delay of fragments": Case({"period": 6, "fragments": 2, "delay": 3, **OUTER}, {}, ADAMW),
    "mixing": Case({"period": 6, "fragments": 2, "delay": 2, "mixing": 0.3, **OUTER}, {}, ADAMW),
    "mixing of averages": Case({"period": 4, "mixing": 0.5}),
    "staleness one": Case({"period": 4, "delay": 4}, {}, ADAMW),
    "outer, staleness one": Case({"period": 4, "delay": 4, **OUTER}, {}, ADAMW),
    "outer without momentum": Case({"period": 5, "outer_learning_rate": 1.0, "outer_momentum": 0.0}),
}
# The fragments of these are exchanged in several parts, too.
IN_PARTS = ("plain", "warm-up", "diloco", "fragments and delay", "mixing", "outer, staleness one")
# Of each kind one, plain and in parts: the other cases are like these.
CHOSEN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one of each kind": (
        (
            *("plain", "accumulation", "uneven last batches", "diloco after warm-up", "fragments and delay", "mixing"),
            *("outer, staleness one", "outer without momentum"),
        ),
        ("plain", "fragments and delay"),
    ),
    "all": (tuple(CASES), IN_PARTS),
}
