"""Trainings that are saved in the middle of a period, and the same taken up from there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from common import report
from lightning.pytorch.callbacks import ModelCheckpoint
from replicas import Case, Replica, train, values
from torch.optim import AdamW

ADAMW: dict[str, Any] = {"optimizer": AdamW, "learning_rate": 0.02, "batch_norm": True}
# Epochs have 8 steps, of which the checkpoint has two: 16, which no period and no exchange ends at.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"period": 5},
    "outer": {"period": 5, "outer_learning_rate": 0.7},
    "int8": {"period": 5, "compression": "int8"},
    "fragments": {"period": 6, "fragments": 6, "delay": 1, "outer_learning_rate": 0.7, "compression": "bf16"},
    "late": {"period": 5, "delay": 5},
    "warm-up": {"period": 5, "warmup_steps": 3},
}


def saved(name: str, folder: Path) -> dict[str, Any]:
    rules, place = CASES[name], folder / name
    saving = ModelCheckpoint(dirpath=place, filename="{step}", every_n_epochs=2, save_top_k=-1)
    whole = train(Case(rules, {"enable_checkpointing": True}, ADAMW), saving)
    unsaved = train(Case(rules, {}, ADAMW))
    checkpoint = place / "step=16.ckpt"
    resumed = train(Case(rules, {}, ADAMW), fit={"ckpt_path": checkpoint})
    other = train(Case({**rules, "period": 7}, {}, ADAMW), fit={"ckpt_path": checkpoint})
    averaged = Replica(**ADAMW)
    averaged.load_state_dict(torch.load(checkpoint / "averaged.ckpt", weights_only=True)["state_dict"])
    return {
        "whole": whole,
        "unsaved": unsaved,
        "resumed": resumed,
        "averaged": values(averaged),
        "other_rules": other["final"],
        "files": sorted(each.name for each in checkpoint.iterdir()),
    }


folder = Path(sys.argv[1])
results = {name: saved(name, folder) for name in CASES}
report(torch.distributed.get_rank(), **results)
torch.distributed.destroy_process_group()
