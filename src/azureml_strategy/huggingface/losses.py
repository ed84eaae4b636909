"""The cross-entropy of a model's tokens, apart from what the model adds to it in its loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
