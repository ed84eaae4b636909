"""Runs a whole training from one configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes
from azureml_strategy.training.recipes import RecipeError

if TYPE_CHECKING:
    from azureml_strategy.training.run import train

__all__ = ["RecipeError", "train"]

__getattr__ = lazy_attributes(__name__, {"train": "azureml_strategy.training.run"})
