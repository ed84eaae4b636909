"""How many samples a batch holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def count_samples(batch: Any) -> int:
    """The leading dimension of the first tensor of a batch.

    Args:
        batch: a tensor, or a mapping or sequence (nested at will) that holds one.

    Raises:
        TypeError: the batch holds no tensor with a leading dimension.
    """
    samples = _leading_dimension(batch)
    if samples is None:
        raise TypeError(
            f"Cannot count the samples of a batch of type {type(batch).__name__}: it holds no tensor with a leading "
            "dimension, and throughput must count real samples. Say how to count them: "
            "ThroughputCallback(batch_size=lambda batch: len(batch.labels))."
        )
    return samples


def _leading_dimension(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        found = (_leading_dimension(item) for item in batch)
        return next((samples for samples in found if samples is not None), None)
    return None
