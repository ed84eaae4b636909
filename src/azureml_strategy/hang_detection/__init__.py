"""Notices a rank that dies or stalls, and says which and where, before the others have waited for half an hour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.hang_detection.callback import HangWatch

__all__ = ["HangWatch"]

__getattr__ = lazy_attributes(__name__, {"HangWatch": "azureml_strategy.hang_detection.callback"})
