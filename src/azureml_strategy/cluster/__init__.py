"""Tells a process which job it belongs to and how Azure ML launched it, and passes this on to Lightning.

`AzureMLEnvironment` and `LaunchGuard` import Lightning when first used; all else needs the standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.cluster.environment import AzureMLEnvironment
    from azureml_strategy.cluster.guard import LaunchGuard
    from azureml_strategy.cluster.job import Job, read_job
    from azureml_strategy.cluster.launch import Launch
    from azureml_strategy.cluster.launchers import detect_launch
    from azureml_strategy.cluster.node_discovery import learn_launch

__all__ = [
    "AzureMLEnvironment",
    "Job",
    "Launch",
    "LaunchError",
    "LaunchGuard",
    "detect_launch",
    "learn_launch",
    "read_job",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "AzureMLEnvironment": "azureml_strategy.cluster.environment",
        "Job": "azureml_strategy.cluster.job",
        "Launch": "azureml_strategy.cluster.launch",
        "LaunchGuard": "azureml_strategy.cluster.guard",
        "detect_launch": "azureml_strategy.cluster.launchers",
        "learn_launch": "azureml_strategy.cluster.node_discovery",
        "read_job": "azureml_strategy.cluster.job",
    },
)
