"""Writes the folder for `from_pretrained` at the end of a training with `JobCheckpoint(hugging_face=True)`."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from azureml_strategy.checkpoint.writer import BackgroundWriter
from azureml_strategy.control.store import ExchangeError, StepError
from azureml_strategy.interfaces import ExportsModels

_NAME = "hugging_face"


def require_models(strategy: Strategy) -> None:
    """Check before the training that there is a model to write.

    Raises:
        MisconfigurationException: the strategy is not ours, or the module holds no transformers model.
    """
    if not isinstance(strategy, ExportsModels):
        raise MisconfigurationException(
            f"JobCheckpoint(hugging_face=True), but {type(strategy).__name__} does not record the model. Write "
            "Trainer(strategy='azureml_ddp'), which works with one device too, or another azureml_* strategy."
        )
    if not strategy.has_models():
        raise MisconfigurationException(
            "JobCheckpoint(hugging_face=True), but the module holds no transformers model. Leave hugging_face out, "
            "or keep the model as an attribute of the module."
        )


def write_folder(trainer: Trainer, checkpoint: Path, background: BackgroundWriter) -> None:
    """Write the folder beside the checkpoints on rank 0, while the other ranks wait; a collective.

    A failure becomes a warning.

    Args:
        trainer: at the end of its training.
        checkpoint: of the training, complete on disk.
        background: connects the ranks.
    """
    strategy, folder = trainer.strategy, checkpoint.parent / _NAME
    assert isinstance(strategy, ExportsModels)

    def replace() -> None:
        if folder.exists():
            shutil.rmtree(folder)
        strategy.export_hugging_face(checkpoint, folder)

    try:
        background.on_rank_zero(trainer, replace)
    except (StepError, ExchangeError) as error:
        rank_zero_warn(
            f"{folder} is not written: {error}. The checkpoint is whole; when the reason is gone, type "
            f"azureml-strategy consolidate {checkpoint} {folder} --format hf"
        )
        return
    rank_zero_info(f"{folder} can be opened by from_pretrained. It is made of {checkpoint.name}.")
