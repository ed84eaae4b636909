"""DeepSpeed's ZeRO: optimizer states, gradients and parameters partitioned over the processes."""

from __future__ import annotations

from azureml_strategy.strategies.zero.strategy import AzureMLDeepSpeedStrategy

__all__ = ["AzureMLDeepSpeedStrategy"]
