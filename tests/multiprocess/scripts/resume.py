"""A training that goes on with what is in its folder; some ranks are killed at a random moment of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from noisy import Tokens, fit

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": AzureMLDDPStrategy,
    "zero": lambda: AzureMLDeepSpeedStrategy(stage=3),
    "pipeline": lambda: PipelineStrategy(micro_batches=2),
    "model_parallel": AzureMLModelParallelStrategy,
}
# DeepSpeed divides a batch by the number of its micro-batches itself.
OPTIONS: dict[str, Any] = {"pipeline": {"accumulate_grad_batches": 1, "val_check_interval": 16}}


class Slow(Callback):
    """Gives a kill the time to hit something, and sets it off when training starts."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if dies and seconds > 0:
            kill_after(seconds)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        time.sleep(0.01)


def kill_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def tiny_gpt() -> LanguageModel:
    network = GPTConfig(vocab_size=32, context=8, layers=2, width=16, heads=2, mlp_width=32)
    return LanguageModel(network, learning_rate=5e-3, warmup_steps=4, seed=3)


strategy, output, killed, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
rank = int(os.environ["RANK"])
dies = str(rank) in killed.split(",")
if dies and seconds < 0:  # while it starts
    kill_after(-seconds)
own = {} if strategy == "ddp" else {"module": tiny_gpt(), "data": Tokens()}
result = fit(output, Slow(), strategy=STRATEGIES[strategy](), max_epochs=3, **own, **OPTIONS.get(strategy, {}))
report(rank, **result)
