"""The former module of `HangWatch`, kept for configurations that name it; use `azureml_strategy.hang_detection`."""

from __future__ import annotations

from azureml_strategy.lazy import lazy_attributes

__getattr__ = lazy_attributes(__name__, {"HangWatch": "azureml_strategy.hang_detection.callback"})
