"""The former place of `azureml_strategy.preemption.TerminateTogether`, for configurations that name it."""

from __future__ import annotations

from azureml_strategy.lazy import lazy_attributes

__getattr__ = lazy_attributes(__name__, {"TerminateTogether": "azureml_strategy.preemption.termination"})
