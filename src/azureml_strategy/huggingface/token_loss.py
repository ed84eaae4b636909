"""The loss of a model's tokens: the number that it is averaged over where ranks have unequal numbers of them, and
the cross-entropy apart from what the model adds to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from azureml_strategy.interfaces import IGNORED_LABEL, AveragesGradients

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tokens_per_loss(labels: Tensor, trainer: Trainer, *, shifted: bool = True) -> Tensor:
    """Return what to give a model of transformers as `num_items_in_batch`, for the average over all ranks' tokens.

    If each rank averaged over its own tokens, those of a rank with few tokens would weigh more. Strategies average
    gradients over the ranks; so each rank must divide its sum of losses by the mean number of tokens of a rank. A
    pipeline averages over micro-batches as well, which have a share of that number each.

    Every rank must call this: in `on_after_batch_transfer`, where a pipeline has the whole batch, or in the step under
    any other strategy. With accumulated gradients each batch of a step counts the same; `FineTuner` weighs these as
    well.

    Args:
        labels: integers `(N, T)`; -100 for what has no loss.
        trainer: of this rank.
        shifted: the loss leaves out the first label of each row, as those of causal language models do.

    Returns:
        A number, a tensor without dimensions on the device of the labels; float32, and float64 with `64-true`. At least
        the share of one token.
    """
    return at_least_one(mean_tokens(labels, trainer, shifted=shifted), trainer)


def mean_tokens(labels: Tensor, trainer: Trainer, *, shifted: bool = True) -> Tensor:
    """Return the number for `tokens_per_loss`, or 0 if no rank has a token."""
    counted = labels[:, 1:] if shifted else labels
    tokens = (counted != IGNORED_LABEL).sum().to(torch.float64 if trainer.precision == "64-true" else torch.float32)
    strategy: Any = trainer.strategy
    # Replicas of local SGD train by themselves: each has a mean of its own.
    chooses = isinstance(strategy, AveragesGradients)
    mean: Tensor = strategy.reduce_as_gradients(tokens) if chooses else strategy.reduce(tokens, reduce_op="mean")
    return mean / _micro_batches(trainer)


def at_least_one(mean: Tensor, trainer: Trainer) -> Tensor:
    """Return a mean number of tokens that can be divided by: at least the share of one token."""
    return mean.clamp(min=1 / trainer.world_size / _micro_batches(trainer))


def _micro_batches(trainer: Trainer) -> int:
    return getattr(trainer.strategy, "micro_batches", 1)


def adds_to_loss(model: PreTrainedModel) -> bool:
    """Whether a model's loss holds more than the cross-entropy: a loss of its routers, or of the size of its logits."""
    text = model.config.get_text_config()
    return bool(getattr(text, "output_router_logits", False) or getattr(text, "z_loss_coefficient", 0))


@contextmanager
def token_losses(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect what a model's loss function returns in its calls inside the block, without gradients."""
    function: Any = model.loss_function
    found: list[Tensor] = []

    def collecting(*args: Any, **kwargs: Any) -> Any:
        loss = function(*args, **kwargs)
        found.append(loss.detach().clone())  # models add the other losses in place
        return loss

    model.loss_function = collecting
    try:
        yield found
    finally:
        model.loss_function = function
