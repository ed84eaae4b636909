"""DeepSpeed's pipeline parallelism under Lightning's Trainer."""

from __future__ import annotations

from azureml_strategy.strategies.pipeline.errors import PipelineError
from azureml_strategy.strategies.pipeline.protocol import PipelineLayer, PipelineReady
from azureml_strategy.strategies.pipeline.strategy import PipelineStrategy
from azureml_strategy.strategies.pipeline.timing import pipeline_bubble

__all__ = [
    "PipelineError",
    "PipelineLayer",
    "PipelineReady",
    "PipelineStrategy",
    "pipeline_bubble",
]
