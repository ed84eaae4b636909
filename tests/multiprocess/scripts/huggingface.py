"""Models of transformers under our strategies: trains each family under each and reports losses or the refusal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import quiet_trainer, report
from families import ACCUMULATED, ManualModule, Module
from lightning.pytorch.strategies import Strategy
from sequences import details

from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLLocalSGDStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)

# Ranks that share a layer, a sequence or a model; one process shares nothing.
SHARING = min(2, int(os.environ["WORLD_SIZE"]))
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": AzureMLDDPStrategy,
    "fsdp": AzureMLModelParallelStrategy,
    "recomputing": lambda: AzureMLModelParallelStrategy(activation_checkpointing=True),
    "local_sgd": lambda: AzureMLLocalSGDStrategy(period=2),
    "diloco": lambda: AzureMLLocalSGDStrategy(period=2, outer_learning_rate=1.0, outer_momentum=0.0),
    "tensor": lambda: AzureMLModelParallelStrategy(tensor_parallel_size=SHARING),
    "sequence": lambda: AzureMLModelParallelStrategy(sequence_parallel_size=SHARING),
    "sequence_tensor": lambda: AzureMLModelParallelStrategy(sequence_parallel_size=2, tensor_parallel_size=2),
    "both": lambda: AzureMLModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2),
    "zero_1": lambda: AzureMLDeepSpeedStrategy(stage=1),
    "zero_2": lambda: AzureMLDeepSpeedStrategy(stage=2),
    "zero_3": lambda: AzureMLDeepSpeedStrategy(stage=3),
    "offload": lambda: AzureMLDeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True),
    "pipeline": lambda: PipelineStrategy(micro_batches=ACCUMULATED),
}


def train(strategy: str, family: str, steps: int, folder: Path | None, lora: bool) -> list[float] | str:
    pipeline = strategy == "pipeline"
    accumulated = 1 if pipeline else ACCUMULATED
    module = Module(family, steps, folder, lora, accumulated)
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](), max_steps=steps, accumulate_grad_batches=accumulated, gradient_clip_val=0.5
    )
    try:
        trainer.fit(module)
    except Exception as error:
        return str(error)
    return module.losses


def train_manually(strategy: str, family: str, steps: int, folder: Path | None) -> list[float]:
    module = ManualModule(family, steps, folder)
    quiet_trainer(strategy=STRATEGIES[strategy](), max_steps=steps).fit(module)
    return module.losses


def main(strategies: str, families: str, steps: str, folders: str, lora: str) -> None:
    results: dict[str, Any] = {}
    for strategy in (each for each in strategies.split(",") if each in STRATEGIES):
        for family in families.split(","):
            folder = Path(folders) / family if folders else None
            results[f"{strategy} {family}"] = train(strategy, family, int(steps), folder, bool(lora))
    if "tensor" in strategies.split(","):  # gradients of its normalised heads are summed in each backward pass
        folder = Path(folders) / families.split(",")[0] if folders else None
        results["manual"] = train_manually("tensor", families.split(",")[0], int(steps), folder)
    if "details" in strategies.split(","):
        results["details"] = details(Path(folders), "more" in strategies.split(","))
    report(int(os.environ["RANK"]), **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
