"""The training that is disturbed: small, but with everything that a restart can lose.

Random numbers on each rank, accumulation, a schedule, validation within epochs, checkpoints every other step.
Arguments: the strategy's name, the folder of its output, and `tracked` to log to the job's MLflow run as well.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from tests.faults.agent import Agent, enter_namespace
from tests.multiprocess.scripts.common import report
from tests.multiprocess.scripts.noisy import Curve, Tokens, fit

from azureml_strategy import strategies
from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.preemption.termination import TerminateTogether
from azureml_strategy.tracking import JobMLFlowLogger

# How long a collective waits for a rank that the network no longer reaches; half an hour by default.
TIMEOUT = timedelta(seconds=float(os.environ.get("FAULTS_TIMEOUT_S", "60")))
# Each is imported where it trains: a process of DDP need not import DeepSpeed.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    # torch's DDP sorts its buckets anew after the first step of each process, and more than two ranks add up what lies
    # elsewhere in a bucket in another order: equal but for the last bits. It does not where parameters may be unused.
    "ddp": lambda: strategies.AzureMLDDPStrategy(
        timeout=TIMEOUT, find_unused_parameters=int(os.environ["WORLD_SIZE"]) > 2
    ),
    "zero": lambda: strategies.AzureMLDeepSpeedStrategy(stage=3, timeout=TIMEOUT),
    "pipeline": lambda: strategies.PipelineStrategy(micro_batches=2, timeout=TIMEOUT),
    "model_parallel": lambda: strategies.AzureMLModelParallelStrategy(timeout=TIMEOUT),
}
# DeepSpeed divides a batch by the number of its micro-batches itself.
OPTIONS: dict[str, Any] = {"pipeline": {"accumulate_grad_batches": 1, "val_check_interval": 16}}


class Slow(Callback):
    """Gives a fault the time to hit something."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        time.sleep(0.01)


class Announced(logging.StreamHandler[TextIO]):
    """Keeps the sentences by which this rank is told that there is no checkpoint of some step."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.captureWarnings(True)  # on the main thread it is a warning, on the writer's a line of the log
        for name in ("py.warnings", "azureml_strategy"):
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        text = record.getMessage()
        if "No checkpoint at step" in text:
            self.lines.append(text[text.index("No checkpoint at step") :])


def tiny_gpt() -> LanguageModel:
    network = GPTConfig(vocab_size=32, context=8, layers=2, width=16, heads=2, mlp_width=32)
    return LanguageModel(network, learning_rate=5e-3, warmup_steps=4, seed=3)


def main(strategy: str, output: Path, tracked: bool) -> None:
    enter_namespace()
    rank = int(os.environ["RANK"])
    output.mkdir(exist_ok=True)
    agent = Agent(rank, output / "checkpoints", output / "done.jsonl")
    announced = Announced()
    loggers = [Curve(output / "curve.jsonl")] if rank == 0 else []
    loggers += [JobMLFlowLogger(flush_interval_s=0.1)] if tracked else []
    options = {"val_check_interval": 8} | OPTIONS.get(strategy, {})
    if int(os.environ["WORLD_SIZE"]) > 2:
        options["val_check_interval"] //= 2  # their epochs are shorter
    result = fit(
        output,
        agent,
        Slow(),
        TerminateTogether(poll_s=0.05, agree_s=0.05),
        strategy=STRATEGIES[strategy](),
        max_epochs=3 * int(os.environ["WORLD_SIZE"]) // 2,  # the fewer samples each rank has, the more often
        logger=loggers or False,
        **({} if strategy == "ddp" else {"module": tiny_gpt(), "data": Tokens()}),
        **options,
    )
    report(rank, **result, announced=announced.lines)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] == ["tracked"])
