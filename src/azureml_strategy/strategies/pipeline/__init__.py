"""DeepSpeed's pipeline parallelism under Lightning's Trainer."""

from __future__ import annotations

from azureml_strategy.strategies.pipeline.engine import pipeline_bubble
from azureml_strategy.strategies.pipeline.partition import PipelineError, PipelineLayer, PipelineReady
from azureml_strategy.strategies.pipeline.strategy import PipelineStrategy

__all__ = [
    "PipelineError",
    "PipelineLayer",
    "PipelineReady",
    "PipelineStrategy",
    "pipeline_bubble",
]
