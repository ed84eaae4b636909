"""Tells a process which job it belongs to and how Azure ML launched it, and passes this on to Lightning.

This module imports only the standard library. `AzureMLEnvironment` and `LaunchGuard` import Lightning when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.job import Job, read_job
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_launch
from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.cluster.environment import AzureMLEnvironment
    from azureml_strategy.cluster.guard import LaunchGuard

__all__ = ["AzureMLEnvironment", "Job", "Launch", "LaunchError", "LaunchGuard", "detect_launch", "read_job"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "AzureMLEnvironment": "azureml_strategy.cluster.environment",
        "LaunchGuard": "azureml_strategy.cluster.guard",
    },
)
