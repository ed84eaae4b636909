"""Lightning strategies that take their processes from the job."""

from __future__ import annotations

from azureml_strategy.strategies.ddp import AzureMLDDPStrategy

__all__ = ["AzureMLDDPStrategy"]
