"""Cuts batches into micro-batches, and checks that the batches of a data loader can be cut."""

from __future__ import annotations

import hashlib
from collections import UserDict
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from azureml_strategy.strategies.pipeline.partition import PipelineError


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch, on its way to the last stage.

    Attributes:
        batch: the samples, in the structure of the whole batch.
        inputs: of the first layer for these samples.
        samples: number of samples.
        hook: name of the LightningModule's method that receives the outputs.
        arguments: of that method besides the batch.
    """

    batch: Any
    inputs: Any
    samples: int
    hook: str
    arguments: tuple[Any, ...]


def batch_size(batch: Any) -> int:
    """Return the number of samples in a batch: the common leading dimension of its tensors.

    Raises:
        PipelineError: the batch holds something other than tensors with one leading dimension.
    """
    leaves, _ = tree_flatten(_plain(batch))
    others = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor) or not leaf.ndim}
    sizes = sorted({leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim})
    if others or len(sizes) != 1:
        raise PipelineError(
            "A pipeline cuts a batch along the first dimension of its tensors, so it must consist of tensors with the "
            f"same number of samples. This one has tensors with {sizes} samples"
            + (f" and values of type {', '.join(sorted(others))} without samples." if others else ".")
            + " Change the collate function, or drop the rest in on_before_batch_transfer."
        )
    return sizes[0]


def cut(batch: Any, size: int) -> list[tuple[Any, int]]:
    """Split a batch into pieces of `size` samples, each with its number of samples. The last one has the rest."""
    leaves, structure = tree_flatten(_plain(batch))
    columns = [leaf.split(size) for leaf in leaves]
    pieces = ((tree_unflatten(list(piece), structure), len(piece[0])) for piece in zip(*columns, strict=True))
    if isinstance(batch, UserDict):
        return [(type(batch)(piece), samples) for piece, samples in pieces]
    return list(pieces)


def _plain(batch: Any) -> Any:
    """Return a dictionary for one that torch does not look into, such as the BatchEncoding of a tokenizer."""
    return dict(batch) if isinstance(batch, UserDict) else batch


def check_divides(samples: int, micro_batches: int, where: str) -> None:
    """Refuse a training batch that cannot be cut into equal micro-batches."""
    if samples % micro_batches or not samples:
        below = samples - samples % micro_batches
        above = below + micro_batches
        sizes = f"{below} or {above}" if below else str(above)
        raise PipelineError(
            f"{where} {samples} samples, which cannot be cut into micro_batches={micro_batches} equal ones. Choose a "
            f"batch size of {sizes} samples a replica, or another number of micro-batches; with a data set that does "
            "not fill its last batch, DataLoader(drop_last=True)."
        )


def shapes(micro_batches: Sequence[MicroBatch]) -> tuple[Any, ...]:
    """Return all that the buffers between the stages depend on."""
    leaves, structure = tree_flatten(micro_batches[0].inputs)
    return torch.is_inference_mode_enabled(), str(structure), tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def fingerprint(targets: Any) -> str:
    """Return a hash of all values, which is equal for equal targets."""
    digest = hashlib.sha256()
    for leaf in tree_flatten(targets)[0]:
        digest.update(repr((leaf.shape, leaf.dtype)).encode())
        digest.update(leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_loader(trainer: Trainer, micro_batches: int) -> None:
    """Refuse batch sizes that the number of micro-batches does not divide, if a DataLoader tells them.

    The batches of any other loader are checked one by one during training.
    """
    trainer.fit_loop.setup_data()  # as when configure_optimizers asks for the number of steps
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return
    check_divides(loader.batch_size, micro_batches, f"DataLoader(batch_size={loader.batch_size}) gives each replica")
    if loader.drop_last or not isinstance(loader.sampler, Sized):
        return
    if trainer.num_training_batches >= len(loader):
        last = len(loader.sampler) % loader.batch_size or loader.batch_size
        check_divides(last, micro_batches, f"The last batch of an epoch of {len(loader.sampler)} samples has")
