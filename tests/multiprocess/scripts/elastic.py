"""A training that goes on with what is in its folder, and writes down what each optimizer step learned from."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from noisy import Tokens, fit
from torch import Tensor

from azureml_strategy.checkpoint import ElasticRestart, ResumeError, checkpoint_to_resume
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)

CONFIG = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2, "train_batch_size": 8}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": AzureMLDDPStrategy,
    "lightning_ddp": lambda: DDPStrategy(process_group_backend="gloo"),
    "zero": lambda: AzureMLDeepSpeedStrategy(stage=3),
    "zero_config": lambda: AzureMLDeepSpeedStrategy(config=CONFIG),
    "model_parallel": AzureMLModelParallelStrategy,
    "tensor_parallel": lambda: AzureMLModelParallelStrategy(tensor_parallel_size=2, tensor_parallel_across_nodes=True),
    "pipeline": lambda: PipelineStrategy(micro_batches=2),
    "pipeline_zero": lambda: PipelineStrategy(micro_batches=2, zero_stage=1),
}


class Recorded(LanguageModel):
    """Writes down, for each batch that a step learned from, the step, the loss and the samples."""

    path: Path

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        rows = [",".join(map(str, row)) for row in batch[0].tolist()]
        with self.path.open("a") as file:
            file.write(json.dumps([self.trainer.global_step, float(loss.detach()), rows]) + "\n")
        return loss


class DieAt(Callback):
    """Every rank is gone before this optimizer step begins, and not before there is a checkpoint."""

    def __init__(self, step: str, folder: Path) -> None:
        self.step = None if step == "None" else int(step)
        self.folder = CheckpointFolder(folder)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            while not self.folder.complete():  # one may be under way in the background
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


def recorded(path: Path) -> Recorded:
    network = GPTConfig(vocab_size=32, context=8, layers=2, width=16, heads=2, mlp_width=32)
    module = Recorded(network, learning_rate=5e-3, warmup_steps=4, seed=3)
    module.path = path
    return module


strategy, output, step, attempt = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
options: dict[str, Any] = json.loads(sys.argv[5])
rank = int(os.environ["RANK"])
output.mkdir(exist_ok=True)
data = Tokens(options.pop("batch_size", 2))
try:
    result = fit(
        output,
        DieAt(step, output / "checkpoints"),
        ElasticRestart(checkpoint_to_resume("auto", output)),
        module=recorded(output / f"steps.{attempt}.{rank}.jsonl"),
        data=data,
        strategy=STRATEGIES[strategy](),
        num_nodes=int(os.environ["WORLD_SIZE"]) if strategy == "lightning_ddp" else 1,
        **options,
    )
except ResumeError as error:
    report(rank, refused=str(error))
    torch.distributed.barrier()  # the first one to end has the others ended
    raise SystemExit(3) from error
report(rank, **result)
