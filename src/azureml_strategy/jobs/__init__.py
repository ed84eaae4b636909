"""Renders scripts and recipes as Azure ML jobs, submits and follows them, and manages what they need in a workspace.

Importing this package does not import azure-ai-ml: a name that needs it imports it on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.jobs.client import connect
    from azureml_strategy.jobs.follow import SubmittedJob
    from azureml_strategy.jobs.hyperparameters import Sweep, parse_parameter
    from azureml_strategy.jobs.prices import Price, price_for
    from azureml_strategy.jobs.render import job_yaml, render_job, render_script
    from azureml_strategy.jobs.service_errors import ServiceError
    from azureml_strategy.jobs.submit import submit_command, submit_recipe, submit_script

__all__ = [
    "JobError",
    "Price",
    "ServiceError",
    "SubmittedJob",
    "Sweep",
    "connect",
    "job_yaml",
    "parse_parameter",
    "price_for",
    "render_job",
    "render_script",
    "submit_command",
    "submit_recipe",
    "submit_script",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "connect": "azureml_strategy.jobs.client",
        "Price": "azureml_strategy.jobs.prices",
        "price_for": "azureml_strategy.jobs.prices",
        "job_yaml": "azureml_strategy.jobs.render",
        "render_job": "azureml_strategy.jobs.render",
        "render_script": "azureml_strategy.jobs.render",
        "ServiceError": "azureml_strategy.jobs.service_errors",
        "SubmittedJob": "azureml_strategy.jobs.follow",
        "Sweep": "azureml_strategy.jobs.hyperparameters",
        "parse_parameter": "azureml_strategy.jobs.hyperparameters",
        "submit_command": "azureml_strategy.jobs.submit",
        "submit_recipe": "azureml_strategy.jobs.submit",
        "submit_script": "azureml_strategy.jobs.submit",
    },
)
