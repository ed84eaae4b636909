"""Loss and top-1/top-5 accuracy of a whole evaluation set, exact over batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from azureml_strategy.interfaces import IGNORED_LABEL

_TOP_K = 5


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return numbers of 16 bits in float32, and others as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def mean_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy in float32 or float64, averaged over the labels that are not `IGNORED_LABEL`; 0 if all are.

    torch's own mean is NaN for a batch without a valid label. One such batch on one rank would make the gradients of
    all ranks NaN.

    Args:
        logits: `(N, classes)`.
        labels: `(N,)`, class indices or `IGNORED_LABEL`.
        label_smoothing: share of the target spread evenly over the classes (Szegedy et al. 2015, section 7,
            https://arxiv.org/abs/1512.00567).
    """
    total = functional.cross_entropy(
        at_least_float32(logits), labels, ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=label_smoothing
    )
    return total / (labels != IGNORED_LABEL).sum().clamp(min=1)


def evaluation_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sums of one batch: `[cross-entropies, top-1 hits, top-5 hits, valid samples]` in float64.

    Sums can be added over batches and ranks and divided once at the end. Means cannot, unless all batches have the same
    size. With five classes or fewer, every valid sample is a top-5 hit.

    Args:
        logits: `(N, classes)`.
        labels: `(N,)`, class indices or `IGNORED_LABEL`, which is not counted.
    """
    loss = functional.cross_entropy(at_least_float32(logits), labels, ignore_index=IGNORED_LABEL, reduction="sum")
    best = logits.topk(min(_TOP_K, logits.shape[1]), dim=1).indices
    hits = best == labels.unsqueeze(1)
    counts = (hits[:, 0].sum(), hits.sum(), (labels != IGNORED_LABEL).sum())
    return torch.stack([loss, *counts]).double()


def evaluation_means(sums: Tensor) -> dict[str, Tensor]:
    """Return `loss`, `top1` and `top5` (0 to 1) from the sums of all batches and ranks; NaN without a valid sample."""
    loss, top1, top5 = (sums[:3] / sums[3]).unbind()
    return {"loss": loss, "top1": top1, "top5": top5}
