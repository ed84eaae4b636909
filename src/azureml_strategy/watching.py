"""The former place of `azureml_strategy.hang_detection.HangWatch`, for configurations that name it."""

from __future__ import annotations

from azureml_strategy.lazy import lazy_attributes

__getattr__ = lazy_attributes(__name__, {"HangWatch": "azureml_strategy.hang_detection.callback"})
