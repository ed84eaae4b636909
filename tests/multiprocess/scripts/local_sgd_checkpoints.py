"""Trainings of replicas that are saved in the middle of a period, and that go on from there.

Arguments: `write`, on two ranks, or `elsewhere`, on another number of them; and the names of rules.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from common import Rows, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from replicas import Notes, Replica, values
from torch import Tensor, nn
from torch.utils.data import DataLoader

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.data import ResumableLoader, ResumableSampler
from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLLocalSGDStrategy
from azureml_strategy.strategies.local_sgd import fragments as parts

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(os.environ["RESULTS"]).parent / "saved"
ENTRY = "azureml_strategy_local_sgd"
# Steps with a checkpoint: by a callback's call, after a validation, and by the Trainer's own.
BY_HAND, VALIDATED, OWN = 9, 12, 14
VALIDATES: dict[str, Any] = {"check_val_every_n_epoch": None, "val_check_interval": VALIDATED}
parts._MOST_ELEMENTS = 7  # so that large fragments are exchanged in several parts
OUTER: dict[str, Any] = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}


def schedule(step: int, learning_rate: float) -> int:
    """A period of the user's, which the checkpoint cannot compare."""
    return 5


# name: the rules, and the checkpoints that a training goes on from
RULES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({"period": 5}, (OWN,)),
    "outer": ({"period": 5, **OUTER}, (BY_HAND, VALIDATED, OWN)),
    "int8": ({"period": 4, "compression": "int8"}, (OWN,)),
    "int8, outer, fragments": ({"period": 6, "compression": "int8", "fragments": 2, **OUTER}, (OWN,)),
    # Its three parts arrive after steps 8, 10 and 12, 14, 16, 18 ..., and each has begun two steps before.
    "under way": ({"period": 6, "fragments": 3, "delay": 2, **OUTER}, (BY_HAND, VALIDATED, OWN)),
    "staleness one": ({"period": 4, "delay": 4, "compression": "bf16"}, (BY_HAND,)),
    "mixing": ({"period": 6, "delay": 3, "mixing": 0.4, **OUTER}, (OWN,)),
    "in the warm-up": ({"period": 4, "warmup_steps": 11, **OUTER}, (BY_HAND,)),
    "own schedule": ({"period": schedule}, (OWN,)),
}


class Dropped(Replica):
    """With dropout, whose random numbers are other ones on each rank, and statistics."""

    def __init__(self) -> None:
        super().__init__(torch.optim.AdamW, 0.02, schedule=7, batch_norm=True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rows, indices = batch
        return super().training_step((nn.functional.dropout(rows, 0.2), indices), batch_idx)


class ByHand(Callback):
    """Saves where a user's callback would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == BY_HAND:
            trainer.save_checkpoint(self.folder / f"step={BY_HAND}.ckpt")


class Started(Callback):
    """What a training begins with: weights, and what all ranks have in common."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = values(pl_module)
        entry = trainer.strategy.own_entries().get(ENTRY, {})
        self.common = {kind: flat(entry.get(kind, {})) for kind in ("anchor", "momentum")}


def flat(named: dict[str, Tensor]) -> list[float]:
    return [number for name in sorted(named) for number in named[name].flatten().tolist()]


def digest(weights: list[list[float]]) -> list[str]:
    return [hashlib.sha256(json.dumps(each).encode()).hexdigest()[:12] for each in weights]


def rows() -> ResumableLoader:
    return ResumableLoader(Rows(), sampler=ResumableSampler(Rows(), WORLD, RANK, seed=3), batch_size=4)


def fit(
    rules: dict[str, Any], *callbacks: Callback, path: Path | None = None, module: Any = None, **arguments: Any
) -> dict[str, Any]:
    notes, started = Notes(), Started()
    strategy = AzureMLLocalSGDStrategy(**rules) if rules else AzureMLDDPStrategy()
    settings = {"max_epochs": 3, "use_distributed_sampler": False, "gradient_clip_val": 0.5, **arguments}
    trainer = quiet_trainer(strategy=strategy, callbacks=[notes, started, *callbacks], **settings)
    module = Replica(torch.optim.AdamW, 0.02, schedule=7, batch_norm=True) if module is None else module
    torch.manual_seed(RANK)
    trainer.fit(module, rows(), DataLoader(Rows(), batch_size=32), ckpt_path=path)
    return {
        "steps": digest(notes.weights),
        "weights": {step: notes.weights[step - 1] for step in (BY_HAND, VALIDATED, OWN) if step <= len(notes.weights)},
        "last": notes.weights[-1],
        "final": values(module),
        "started": started.weights,
        "common": started.common,
    }


def savers(folder: Path) -> list[Callback]:
    every = ModelCheckpoint(folder, "{step}", every_n_train_steps=OWN, save_top_k=-1)
    best = ModelCheckpoint(folder / "validated", "{step}", monitor="val_loss", save_top_k=-1)
    return [every, best, ByHand(folder)]


def place(name: str, step: int) -> Path:
    return FOLDER / name / ("validated" if step == VALIDATED else "") / f"step={step}.ckpt"


def write() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in sys.argv[2:]:
        rules, steps = RULES[name]
        undisturbed = fit(rules, limit_val_batches=0)
        saving = fit(rules, *savers(FOLDER / name), **VALIDATES, enable_checkpointing=True)
        resumed = {step: fit(rules, path=place(name, step), limit_val_batches=0) for step in steps}
        results[name] = {"undisturbed": undisturbed, "saving": saving, "resumed": resumed}
    return {"rules": results, "job checkpoint": job_checkpoint(), "others": others(), "refused": refused()}


def job_checkpoint() -> dict[str, Any]:
    """With random numbers of each rank, in a thread that writes while the ranks train."""
    rules, folder = RULES["under way"][0], FOLDER / "job"
    saver = JobCheckpoint(folder, "{step}", every_n_train_steps=5, keep_last=9)
    saving = fit(rules, saver, module=Dropped(), enable_checkpointing=True, limit_val_batches=0)
    again = JobCheckpoint(folder, "{step}", every_n_train_steps=100)
    path = folder / "step=15.ckpt"
    resumed = fit(rules, again, path=path, module=Dropped(), enable_checkpointing=True, limit_val_batches=0)
    undisturbed = fit(rules, module=Dropped(), limit_val_batches=0)
    return {"undisturbed": undisturbed, "saving": saving, "resumed": {15: resumed}}


def others() -> dict[str, Any]:
    """From DDP's checkpoint, to DDP, by other rules, and what `test` makes of a folder."""
    rules, folder = RULES["outer"][0], place("outer", OWN)
    ddp = ModelCheckpoint(FOLDER / "ddp", "{step}", every_n_train_steps=OWN, save_top_k=-1)
    fit({}, ddp, enable_checkpointing=True, limit_val_batches=0)
    module = Replica(batch_norm=True)
    tester = quiet_trainer(strategy=AzureMLLocalSGDStrategy(**rules))
    (tested,) = tester.validate(module, DataLoader(Rows(), batch_size=64), ckpt_path=folder, verbose=False)
    return {
        "from ddp": fit(rules, path=FOLDER / "ddp" / f"step={OWN}.ckpt", limit_val_batches=0),
        "to ddp": fit({}, path=folder / "averaged.ckpt", limit_val_batches=0),
        "other rules": fit({**rules, "period": 4}, path=folder, limit_val_batches=0),
        "tested": {"loss": tested["val_loss"], "weights": values(module)},
    }


def refused() -> dict[str, str]:
    """A folder of which one node's files are missing, and one whose files are of two steps."""
    for name in ("lacks", "mixed"):
        if RANK == 0:
            shutil.copytree(place("outer", OWN), FOLDER / name)
    if RANK == 0:
        (FOLDER / "lacks" / "rank_00001.pt").unlink()
        for rank in range(WORLD):
            shutil.copy(place("outer", BY_HAND) / f"rank_{rank:05d}.pt", FOLDER / "mixed")
    torch.distributed.barrier()
    return {name: refusal(FOLDER / name) for name in ("lacks", "mixed")}


def refusal(path: Path) -> str:
    try:
        fit(RULES["outer"][0], path=path, limit_val_batches=0)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return "nothing was said"


def elsewhere() -> dict[str, Any]:
    names = sys.argv[2:]
    resumed = {name: fit(RULES[name][0], path=place(name, OWN), limit_val_batches=0) for name in names}
    saved = {name: torch.load(place(name, OWN) / "averaged.ckpt", weights_only=True)[ENTRY] for name in names}
    common = {name: {kind: flat(each[kind]) for kind in ("anchor", "momentum")} for name, each in saved.items()}
    return {"resumed": resumed, "common": common, "warned": warned()}


def warned() -> dict[str, bool]:
    """Whether a job's checkpoint says that DDP's buckets are sorted anew."""
    said = {}
    for name, rules in {"apart": {"period": 2}, "in the warm-up": {"period": 2, "warmup_steps": 3}, "ddp": {}}.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saver = JobCheckpoint(FOLDER / f"warned {name} {WORLD}", every_n_train_steps=100)
            fit(rules, saver, max_epochs=1, enable_checkpointing=True)
        said[name] = any("sorts its buckets anew" in str(each.message) for each in caught)
    return said


results = {"write": write, "elsewhere": elsewhere}[sys.argv[1]]()
report(RANK, **{sys.argv[1]: results})
torch.distributed.destroy_process_group()
