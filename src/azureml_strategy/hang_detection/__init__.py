"""Detects a rank that dies or stalls, and reports which one and where, well before the process group times out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.hang_detection.callback import HangWatch

__all__ = ["HangWatch"]

__getattr__ = lazy_attributes(__name__, {"HangWatch": "azureml_strategy.hang_detection.callback"})
