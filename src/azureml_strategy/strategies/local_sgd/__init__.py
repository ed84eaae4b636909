"""Local SGD and DiLoCo: replicas train by themselves, and average what they have learned once in a while."""

from __future__ import annotations

from azureml_strategy.strategies.local_sgd.period import GrowingPeriod, QuadraticPeriod
from azureml_strategy.strategies.local_sgd.strategy import AzureMLLocalSGDStrategy

__all__ = ["AzureMLLocalSGDStrategy", "GrowingPeriod", "QuadraticPeriod"]
