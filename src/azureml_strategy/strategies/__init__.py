"""Lightning strategies whose processes come from the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.strategies.ddp import AzureMLDDPStrategy
    from azureml_strategy.strategies.local_sgd import AzureMLLocalSGDStrategy
    from azureml_strategy.strategies.model_parallel import AzureMLModelParallelStrategy
    from azureml_strategy.strategies.pipeline import PipelineStrategy
    from azureml_strategy.strategies.zero import AzureMLDeepSpeedStrategy

__all__ = [
    "AzureMLDDPStrategy",
    "AzureMLDeepSpeedStrategy",
    "AzureMLLocalSGDStrategy",
    "AzureMLModelParallelStrategy",
    "PipelineStrategy",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "AzureMLDDPStrategy": "azureml_strategy.strategies.ddp",
        "AzureMLDeepSpeedStrategy": "azureml_strategy.strategies.zero",
        "AzureMLLocalSGDStrategy": "azureml_strategy.strategies.local_sgd",
        "AzureMLModelParallelStrategy": "azureml_strategy.strategies.model_parallel",
        "PipelineStrategy": "azureml_strategy.strategies.pipeline",
    },
)
