"""What a pipeline refuses."""

from __future__ import annotations

from azureml_strategy.strategies.errors import ConfigurationError


class PipelineError(ConfigurationError):
    """A module, a batch, a Trainer or a checkpoint that does not fit the pipeline; the message says what to change."""
