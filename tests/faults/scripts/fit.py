"""Trains a script of the catalogue with our checkpoints around it, as a user of ours would.

Arguments: the strategy's name, the folder of its output, the script's name.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor
from tests.faults.agent import Agent, enter_namespace
from tests.faults.scripts.catalogue import DDP, SCRIPTS, ZERO
from tests.faults.scripts.witness import Batches, witnessed
from tests.faults.training import TIMEOUT
from tests.multiprocess.scripts.common import report
from tests.multiprocess.scripts.noisy import Curve

from azureml_strategy import strategies
from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.resume import checkpoint_to_resume
from azureml_strategy.preemption.termination import TerminateTogether

# What the script adds goes to DDP only. ONE_PROCESS is for `chain.py`: it needs no process group.
ONE_PROCESS = "auto"
STRATEGIES: dict[str, Callable[..., Any]] = {
    DDP: lambda **added: strategies.AzureMLDDPStrategy(timeout=TIMEOUT, **added),
    ZERO: lambda **added: strategies.AzureMLDeepSpeedStrategy(stage=2, timeout=TIMEOUT),
    ONE_PROCESS: lambda **added: "auto",
}


class _Began(Callback):
    """How many of the warnings came before the first batch."""

    def __init__(self, caught: list[warnings.WarningMessage]) -> None:
        self._caught = caught
        self.warned: list[str] | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.warned is None:
            self.warned = [str(each.message) for each in self._caught]


def fit(name: str, output: Path, *callbacks: Callback, strategy: str = ONE_PROCESS, **arguments: Any) -> dict[str, Any]:
    """Train, or go on with the training that is in this folder.

    Args:
        name: of the script.
        output: the folder.
        callbacks: further ones.
        strategy: a name of `STRATEGIES`.
        arguments: the Trainer's, instead of the script's.

    Returns:
        What `witnessed` says of the end; `read`, the batches of this attempt; `warned`, before the first of them.
    """
    rank = int(os.environ.get("RANK", "0"))
    output.mkdir(exist_ok=True)
    seed_everything(42, workers=True, verbose=False)
    script = SCRIPTS[name].make()
    saver = JobCheckpoint(
        output / "checkpoints", monitor=script.monitor, every_n_train_steps=script.every_n_train_steps
    )
    batches = Batches(output / f"batches-{rank}.jsonl")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = _Began(caught)
        logged = [LearningRateMonitor()] if rank == 0 else []
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            strategy=STRATEGIES[strategy](**script.strategy),
            logger=Curve(output / "curve.jsonl") if rank == 0 else False,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=output,
            callbacks=[*script.callbacks, saver, *logged, began, batches, *callbacks],
            **{**script.arguments, **arguments},
        )
        chosen = checkpoint_to_resume("auto", output)
        trainer.fit(script.module, **script.data(), ckpt_path=chosen)
    return {**witnessed(trainer, script.kept()), "read": batches.read, "warned": began.warned or []}


def main(strategy: str, output: Path, name: str) -> None:
    enter_namespace()
    rank = int(os.environ["RANK"])
    output.mkdir(exist_ok=True)
    agent = Agent(rank, output / "checkpoints", output / "done.jsonl")
    report(rank, **fit(name, output, agent, TerminateTogether(poll_s=0.05, agree_s=0.05), strategy=strategy))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
