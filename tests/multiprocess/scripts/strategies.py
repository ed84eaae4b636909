"""Each strategy for two ranks, and the smallest network that all of them take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import Strategy

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)

# DeepSpeed's own take 800 MB in each step.
BUCKETS = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), 2**16)
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": AzureMLDDPStrategy,
    "zero": lambda: AzureMLDeepSpeedStrategy(stage=3, **BUCKETS),
    "zero_2": lambda: AzureMLDeepSpeedStrategy(**BUCKETS),
    "pipeline": lambda: PipelineStrategy(micro_batches=2),
    "model_parallel": AzureMLModelParallelStrategy,
}
# DeepSpeed divides a batch by the number of its micro-batches itself.
OPTIONS: dict[str, Any] = {"pipeline": {"accumulate_grad_batches": 1}}


def tiny_gpt() -> LanguageModel:
    network = GPTConfig(vocab_size=32, context=8, layers=2, width=16, heads=2, mlp_width=32)
    return LanguageModel(network, learning_rate=5e-3, warmup_steps=4, seed=3)
