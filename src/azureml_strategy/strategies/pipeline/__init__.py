"""DeepSpeed's pipeline parallelism under Lightning's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
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

# How a network is cut is known without DeepSpeed.
__getattr__ = lazy_attributes(
    __name__,
    {
        "PipelineError": "azureml_strategy.strategies.pipeline.partition",
        "PipelineLayer": "azureml_strategy.strategies.pipeline.partition",
        "PipelineReady": "azureml_strategy.strategies.pipeline.partition",
        "PipelineStrategy": "azureml_strategy.strategies.pipeline.strategy",
        "pipeline_bubble": "azureml_strategy.strategies.pipeline.engine",
    },
)
