"""Looks at a train data loader for batches that cannot be cut, before training starts."""

from __future__ import annotations

from collections.abc import Sized

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from azureml_strategy.strategies.pipeline.micro_batches import check_divides


def check_loader(trainer: Trainer, micro_batches: int) -> None:
    """Refuse batch sizes that the number of micro-batches does not divide, as far as a DataLoader says them.

    What a loader of another kind gives is checked batch by batch.

    Raises:
        PipelineError: the batches, or the last one of an epoch, cannot be cut into equal micro-batches.
    """
    trainer.fit_loop.setup_data()  # as configure_optimizers has it done when it asks for the number of steps
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return
    check_divides(loader.batch_size, micro_batches, f"DataLoader(batch_size={loader.batch_size}) gives each replica")
    if loader.drop_last or not isinstance(loader.sampler, Sized):
        return
    if trainer.num_training_batches >= len(loader):
        last = len(loader.sampler) % loader.batch_size or loader.batch_size
        check_divides(last, micro_batches, f"The last batch of an epoch of {len(loader.sampler)} samples has")
