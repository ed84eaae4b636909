"""A plain script: it trains, and knows nothing of an earlier attempt. With a line of ours, or with none.

Arguments: strategy, `line` or `stock` or `undisturbed`, the step before which all ranks die (or are told by SIGTERM).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from tests.multiprocess.scripts.common import report
from tests.multiprocess.scripts.noisy import Curve, Noisy, Numbers, Tokens
from tests.multiprocess.scripts.strategies import STRATEGIES, tiny_gpt
from torch.utils.data import DataLoader

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.fit_resume import OUTPUT_VARIABLE
from azureml_strategy.checkpoint.folder import CheckpointFolder

FOLDER = Path(os.environ["RESULTS"]).parent
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class End(Callback):
    """Every rank is gone before this optimizer step, or one is told by SIGTERM, and not before all have begun."""

    def __init__(self, step: int | None, how: str, folder: Path) -> None:
        self.step, self.how, self.folder = step, how, folder

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.step is None or trainer.global_step < self.step:
            return
        if self.how == "term":
            if RANK == WORLD - 1 and trainer.global_step == self.step:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            return
        while not CheckpointFolder(self.folder).complete():  # one may be under way in the background
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


class Weights(Callback):
    """What the training ends with, whichever part of it this rank has."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = {}
        for name, value in trainer.strategy.lightning_module_state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            self.weights[name] = whole.detach().flatten().tolist()


def main(name: str, kind: str, step: str, how: str, options: dict[str, Any]) -> None:
    """Train, in the way of the Lightning documentation's first example."""
    text = name in ("pipeline", "zero", "zero_2", "model_parallel")
    output = Path(os.environ.get(OUTPUT_VARIABLE, FOLDER / "root"))
    seed_everything(5 + RANK, verbose=False)
    data = Tokens(4 if name == "pipeline" else 2) if text else Numbers()
    module = tiny_gpt() if text else Noisy()
    # which loader: one that knows its place, or a plain one that shuffles
    loader = {"plain": lambda: DataLoader(data.rows, batch_size=2, shuffle=True)}.get(options.pop("loader", ""))
    weights = Weights()
    savers: dict[str, list[Callback]] = {
        "line": [JobCheckpoint(every_n_train_steps=2, resume="auto")],
        "stock": [ModelCheckpoint(FOLDER / f"stock.{kind}", save_top_k=-1)],
        "default": [],
    }
    strategy = DDPStrategy(process_group_backend="gloo") if name == "stock_ddp" else STRATEGIES[name]()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=WORLD if name == "stock_ddp" else 1,
        strategy=strategy,
        max_epochs=2,
        accumulate_grad_batches=1 if name == "pipeline" else 2,
        val_check_interval=4,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=FOLDER / "root",
        logger=Curve(FOLDER / "curve.jsonl") if RANK == 0 else False,
        callbacks=[*savers[kind], End(None if step == "-" else int(step), how, output / "checkpoints"), weights],
        **options,
    )
    if loader is None:
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, loader())
    best = trainer.checkpoint_callback.best_model_path if kind != "line" else ""
    report(RANK, step=trainer.global_step, weights=weights.weights, best=best, ours=_ours(trainer))


def _ours(trainer: Trainer) -> int:
    return sum(isinstance(each, JobCheckpoint) for each in trainer.callbacks)


main(*sys.argv[1:5], json.loads(sys.argv[5]) if len(sys.argv) > 5 else {})
if torch.distributed.is_initialized():
    torch.distributed.barrier()
