"""FSDP2 and tensor parallelism: parameters sharded over replicas, layers cut over the ranks of one replica."""

from __future__ import annotations

from azureml_strategy.strategies.model_parallel.strategy import AzureMLModelParallelStrategy

__all__ = ["AzureMLModelParallelStrategy"]
