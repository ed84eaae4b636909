"""The layouts of checkpoints that can be read on one process, each in a file of its own."""

from __future__ import annotations

from azureml_strategy.checkpoint.formats.distributed import DISTRIBUTED
from azureml_strategy.checkpoint.formats.format import CheckpointFormat, CheckpointFormatError
from azureml_strategy.checkpoint.formats.pipeline import PIPELINE
from azureml_strategy.checkpoint.formats.single_file import SINGLE_FILE
from azureml_strategy.checkpoint.formats.zero import ZERO

__all__ = ["FORMATS", "CheckpointFormat", "CheckpointFormatError"]

FORMATS: tuple[CheckpointFormat, ...] = (ZERO, PIPELINE, DISTRIBUTED, SINGLE_FILE)
