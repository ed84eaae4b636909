"""The loss of a causal language model of transformers, computed in its output layer without all of its logits.

transformers computes the logits of a whole batch, and then their loss in float32. Here the output layer returns the
loss itself, and the model's loss function passes it on. So the matrix is used inside of its own layer, where the hooks
of FSDP2 and ZeRO-3 gather it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from azureml_strategy.huggingface.transformers_internals import has_usual_loss
from azureml_strategy.interfaces import IGNORED_LABEL
from azureml_strategy.models.gpt import users_hooks
from azureml_strategy.models.linear_loss import linear_cross_entropy, takes_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def passes_logits_on(model: PreTrainedModel) -> bool:
    """Whether a model's loss is that of transformers, of what its output layer returns.

    Some models scale or cap their logits, or add to their loss. So a model's forward is tried on two tokens, with a
    base model and an output layer that compute nothing. No parameter is read: they may be on any device, or cut.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    layer: Any = _output_layer(model)
    base = model.base_model
    if type(layer) is not nn.Linear or layer.bias is not None or base is model or not has_usual_loss(model):
        return False
    if any("forward" in vars(each) for each in (model, base, layer)):  # somebody has replaced it
        return False
    states = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=torch.zeros(1, 2, layer.in_features))
    states.router_logits = None  # of a mixture of experts
    logits, loss, taken = torch.zeros(1, 2, layer.out_features), torch.zeros(()), list[dict[str, Any]]()

    def loss_of(logits: Tensor, labels: Tensor, vocab_size: int, **others: Any) -> Tensor:
        taken.append({"logits": logits, "labels": labels, "vocab_size": vocab_size, **others})
        return loss

    labels = torch.zeros(1, 2, dtype=torch.int64)
    inputs = {"labels": labels, "shift_labels": labels, "num_items_in_batch": torch.ones(())}
    try:
        with _replaced(model, {layer: lambda hidden: logits, base: lambda *args, **kwargs: states}, loss_of):
            outputs = model.forward(input_ids=labels, use_cache=False, **inputs)
            is_passed = outputs.loss is loss and loss._version == 0  # what is added to it may be computed of the logits
    except Exception:  # nobody knows what a stranger's forward does with so little
        return False
    expected = {**inputs, "logits": logits}
    is_passed &= len(taken) == 1 and all(taken[0].get(name) is value for name, value in expected.items())
    return is_passed and taken[0]["vocab_size"] == layer.out_features and logits._version == 0


@contextmanager
def loss_in_chunks(model: PreTrainedModel, labels: Tensor, tokens: Tensor) -> Iterator[None]:
    """Let a model's output layer compute the loss where a batch has many logits. The model is called once inside.

    Args:
        model: `passes_logits_on`.
        labels: int64 `(N, T)`, that of each token or `IGNORED_LABEL`.
        tokens: what the sum of the losses is divided by.
    """
    layer = _output_layer(model)
    logits_of, loss_of_logits, given = layer.forward, model.loss_function, list[Tensor]()

    def forward(hidden: Tensor) -> Any:
        weight = layer.weight  # that of the moment: gathered, or cut over ranks
        fits = type(weight) is nn.Parameter and hidden.shape[:-1] == labels.shape
        if not fits or not takes_chunks(weight, labels):
            return logits_of(hidden)
        given.append(linear_cross_entropy(hidden, weight, labels) * ((labels != IGNORED_LABEL).sum() / tokens))
        return given[-1]

    def loss_of(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not given:
            return loss_of_logits(logits, *args, **kwargs)
        # Hooks of ZeRO-3 return another tensor with the same memory.
        if logits.data_ptr() != given[-1].data_ptr() or logits._version != given[-1]._version:
            raise RuntimeError(
                f"{type(model).__name__} changes its logits before their loss, which it did not do when it was built. "
                "Set what it changes them by in its configuration, before FineTuner.configure_model ends."
            )
        return logits

    with _replaced(model, {layer: forward}, loss_of):
        yield


def only_the_loss_is_seen(model: PreTrainedModel, called: Any) -> bool:
    """Whether nobody replaces, compiles or watches what would give a loss in place of logits, or changes that loss.

    A callback, or a subclass that has built the model, may have done so since `passes_logits_on`.

    Args:
        model: `passes_logits_on`.
        called: by the step: the model, or adapters around it.
    """
    layer = _output_layer(model)
    if type(layer) is not nn.Linear or layer.bias is not None or not has_usual_loss(model):
        return False
    if torch.compiler.is_compiling():  # a user compiles the step
        return False
    adapters = () if called is model else (called, called.base_model)
    return not any(
        "forward" in vars(each) or each._compiled_call_impl is not None or users_hooks(each)
        for each in (*adapters, model, layer)
    )


def _output_layer(model: Any) -> Any:
    return model.get_output_embeddings()


@contextmanager
def _replaced(
    model: PreTrainedModel, forwards: Mapping[Any, Callable[..., Any]], loss_function: Callable[..., Any]
) -> Iterator[None]:
    """Replace the forward of modules that have that of their class, and a model's loss function."""
    before = model.loss_function
    model.loss_function = loss_function
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        model.loss_function = before
        for module in forwards:
            del module.forward
