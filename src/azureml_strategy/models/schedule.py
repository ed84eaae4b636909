"""The learning rate of each step: linear scaling, linear warm-up, cosine decay."""

from __future__ import annotations

import math

# The batch that published ResNet-50 learning rates are stated for: Goyal et al. 2017, section 2.1
# (https://arxiv.org/abs/1706.02677): "0.1 for 256 images".
REFERENCE_BATCH = 256


def scaled_learning_rate(learning_rate: float, global_batch: int) -> float:
    """The linear scaling rule of Goyal et al. 2017: the peak learning rate grows with the global batch.

    Args:
        learning_rate: for `REFERENCE_BATCH` samples a step.
        global_batch: samples a step over all replicas, gradient accumulation included.
    """
    return learning_rate * global_batch / REFERENCE_BATCH


def warmup_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """The share of the peak learning rate that a step uses.

    It rises linearly from `1 / warmup_steps` to 1 over the warm-up (Goyal et al. 2017, section 2.2), then
    falls to zero along half a cosine (Loshchilov and Hutter 2016, https://arxiv.org/abs/1608.03983, no restarts).

    Args:
        step: optimizer steps already taken, from 0.
        warmup_steps: steps of the warm-up; a run that ends before it never reaches the peak.
        total_steps: steps of the whole run, warm-up included; 0.0 from there on.

    Returns:
        Between 0 and 1.
    """
    if step >= total_steps:
        return 0.0
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps)))
