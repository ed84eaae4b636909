"""Writes checkpoints of a run and resumes from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.checkpoint.elastic import ElasticRestart
    from azureml_strategy.checkpoint.job_checkpoint import JobCheckpoint
    from azureml_strategy.checkpoint.resume import ResumeError, checkpoint_to_resume
    from azureml_strategy.checkpoint.serialization import saved_hyperparameters

__all__ = ["ElasticRestart", "JobCheckpoint", "ResumeError", "checkpoint_to_resume", "saved_hyperparameters"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "ElasticRestart": "azureml_strategy.checkpoint.elastic",
        "JobCheckpoint": "azureml_strategy.checkpoint.job_checkpoint",
        "ResumeError": "azureml_strategy.checkpoint.resume",
        "checkpoint_to_resume": "azureml_strategy.checkpoint.resume",
        "saved_hyperparameters": "azureml_strategy.checkpoint.serialization",
    },
)
