"""Lightning strategies whose processes come from the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.strategies.ddp import AzureMLDDPStrategy
    from azureml_strategy.strategies.model_parallel import AzureMLModelParallelStrategy
    from azureml_strategy.strategies.pipeline import PipelineStrategy
    from azureml_strategy.strategies.zero import AzureMLDeepSpeedStrategy

__all__ = ["AzureMLDDPStrategy", "AzureMLDeepSpeedStrategy", "AzureMLModelParallelStrategy", "PipelineStrategy"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "AzureMLDDPStrategy": "azureml_strategy.strategies.ddp",
        "AzureMLDeepSpeedStrategy": "azureml_strategy.strategies.zero",
        "AzureMLModelParallelStrategy": "azureml_strategy.strategies.model_parallel",
        "PipelineStrategy": "azureml_strategy.strategies.pipeline",
    },
)
