"""Stops all ranks at one step when a node is about to be taken away, saves a checkpoint, and ends or goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.preemption.termination import TerminateTogether

__all__ = ["TerminateTogether"]

__getattr__ = lazy_attributes(__name__, {"TerminateTogether": "azureml_strategy.preemption.termination"})
