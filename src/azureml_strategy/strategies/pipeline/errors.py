"""What a pipeline refuses."""

from __future__ import annotations


class PipelineError(ValueError):
    """A module, a batch, a Trainer or a checkpoint that does not fit the pipeline; the message says what to change."""
