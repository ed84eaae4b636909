"""Causal language models of transformers whose sequences are shared by several ranks.

transformers' own registry of attention functions replaces the model's attention by one that has all tokens of some
heads (`azureml_strategy.sequence_parallel`). Hooks around the model give it this rank's part of each sequence, and make
its loss that of the whole one. The user's module sees neither: it gives whole batches and gets whole results.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from azureml_strategy.huggingface.sources import PretrainedModelError
from azureml_strategy.huggingface.transformers_internals import (
    attention_name,
    has_registered_attention,
    has_usual_forward,
    has_usual_loss,
    is_causal_language_model,
    is_pretrained_model,
    passes_state_on,
    recorded_outputs,
    register_attention,
    stock_attention,
)
from azureml_strategy.interfaces import IGNORED_LABEL
from azureml_strategy.sequence_parallel import SequenceGroup

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Arguments with one entry for each token, of which a rank gets its part. Where the parts would be unequal, zeros are
# added behind the last token. No token sees these, as they come after all of them.
_BY_TOKEN = ("input_ids", "inputs_embeds", "position_ids")
# Further arguments with an entry for each token, which are treated in another way.
_LABELS_AND_MASK = ("labels", "shift_labels", "attention_mask")
# Kinds of layers whose tokens see each other by attention alone.
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
# Models with learned positions that are 0 for the first token of a row. RoBERTa's are not.
_COUNT_FROM_ZERO = {"gpt2"}
# What the names of attention functions from here begin with. transformers reads more in a name with "flash" in it.
_NAME = "sequence_parallel_"
# Arguments of a model's forward for what needs all tokens on one rank.
_NEEDS_ALL = (
    *("past_key_values", "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "cu_seq_lens_q", "cu_seq_lens_k"),
)


class SharedSequences:
    """Hooks of a causal language model, by which the ranks of a group compute each of its sequences together.

    A call with labels returns the loss of the whole batch, and logits of this rank's tokens while gradients are
    recorded. Any other call returns whole logits.

    Args:
        model: whose attention is replaced.
        adapters: modules around it that may call its forward without its hooks.
        group: the ranks.

    Raises:
        PretrainedModelError: something in the model mixes tokens outside of its attention.
    """

    def __init__(self, model: PreTrainedModel, adapters: Iterable[nn.Module], group: SequenceGroup) -> None:
        _check(model)
        self._group = group
        self._signature = inspect.signature(model.forward)
        self._attention = attention_name(model)
        self._longest: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._length = 0
        self._whole_logits = False
        self._as_tuple = False
        self._model = model
        self._outermost: nn.Module | None = None  # of those that are being called
        name = f"{_NAME}{id(self)}"
        register_attention(name, *self._around_stock())
        model.set_attn_implementation(name)
        inner = [each for each in model.modules() if is_pretrained_model(each) and each is not model]
        self._hooks = [each.register_forward_pre_hook(self._check_is_inside) for each in inner]
        for each in (model, *adapters):
            self._hooks += [
                each.register_forward_pre_hook(self._cut, with_kwargs=True),
                each.register_forward_hook(self._join, always_call=True),
            ]

    def remove(self) -> None:
        """Make the model compute whole sequences again."""
        for hook in self._hooks:
            hook.remove()
        self._model.set_attn_implementation(self._attention)

    def _around_stock(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return an attention function that has all tokens of some heads, and the one that makes its masks."""
        group, configured = self._group, copy.copy(self._model.config.get_text_config())
        # The registry never drops a function, so the function must not keep this object alive.
        kind, reference = type(self._model).__name__, weakref.ref(self)
        stock, stock_mask = stock_attention(self._attention)

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
        ) -> tuple[Tensor, None]:
            # Arguments of the model reach its attention. Flash attention would look for packed samples in positions.
            further = {each: value for each, value in kwargs.items() if each not in ("position_ids", "shift_labels")}
            unfit = [each for each, value in further.items() if isinstance(value, Tensor) and value.dim()]
            if unfit:
                raise PretrainedModelError(
                    f"{type(module).__name__} gives its attention {', '.join(unfit)}, which would be of all heads and "
                    "this rank's tokens. Write sequence_parallel_size=1."
                )
            states = (group.heads(each) for each in (query, key, value))
            attended, _ = stock(_LayerAsConfigured(module, configured), *states, attention_mask, **further)
            return group.tokens(attended.transpose(1, 2)).transpose(1, 2).contiguous(), None

        def mask(q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
            shared = reference()
            if shared is None or shared._outermost is None:
                raise PretrainedModelError(
                    f"Another model than the {kind} whose sequences are shared was made from its configuration. Make "
                    "it from one with attn_implementation='sdpa'."
                )
            whole = q_length * group.size
            return stock_mask(q_length=whole, kv_length=whole, attention_mask=attention_mask, **kwargs)

        return attention, mask

    def _check_is_inside(self, layers: nn.Module, args: object) -> None:
        if self._outermost is None:
            raise PretrainedModelError(
                f"{type(layers).__name__} was called without its head, and its tokens are not those of one rank. Call "
                f"the {type(self._model).__name__} around it, or write sequence_parallel_size=1."
            )

    def _cut(
        self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        """Give the model this rank's part of its arguments."""
        if self._outermost is not None:
            return None
        bound = dict(zip(self._signature.parameters, args, strict=False)) | kwargs
        inputs = {name: value for name, value in bound.items() if value is not None}
        self._as_tuple = not inputs.pop("return_dict", True)
        tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
        self._length = tokens.shape[1]
        self._refuse(inputs)
        self._whole_logits = "labels" not in inputs or not torch.is_grad_enabled()
        inputs = self._with_positions(self._with_shifted_labels(inputs), tokens)
        parts = {name: self._group.part(inputs[name]) for name in _BY_TOKEN if name in inputs}
        self._outermost = called
        return (), {**inputs, **parts, "use_cache": False, "return_dict": True}

    def _with_shifted_labels(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Shift the labels before they are cut, and count them all.

        Each rank divides the losses of its tokens by its share of the number, so that the ranks' mean is the loss.
        """
        if "labels" not in inputs:
            return inputs
        ignored = inputs.get("ignore_index", IGNORED_LABEL)
        shifted = inputs.get("shift_labels")
        if shifted is None:
            shifted = nn.functional.pad(inputs["labels"], (0, 1), value=ignored)[:, 1:]
        tokens = inputs.get("num_items_in_batch")
        if tokens is None:
            tokens = (shifted != ignored).sum()
        part = self._group.part(shifted, ignored)
        return {**inputs, "labels": part, "shift_labels": part, "num_items_in_batch": tokens / self._group.size}

    def _with_positions(self, inputs: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
        """Number the tokens from the first of the sequence, and make the mask as long as all parts together."""
        padded = self._length + -self._length % self._group.size
        # A compiled model without a mask would look for packed samples in the positions of this rank.
        mask = inputs.get("attention_mask", torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device))
        inputs["attention_mask"] = nn.functional.pad(mask, (0, padded - self._length), value=1)
        places = torch.arange(padded, device=tokens.device).expand(len(tokens), -1)
        if "position_ids" in inputs:
            places = places + inputs["position_ids"][:, :1]
        return {**inputs, "position_ids": places}

    def _refuse(self, inputs: Mapping[str, Any]) -> None:
        given = {name: inputs[name] for name in _NEEDS_ALL if name in inputs}
        # False and 0 switch such an argument off.
        needs_all = [name for name, value in given.items() if not (isinstance(value, int) and value == 0)]
        # An argument that is not known here may have an entry for each token.
        known = (*_BY_TOKEN, *_LABELS_AND_MASK, *_NEEDS_ALL)
        further = {name: value for name, value in inputs.items() if name not in known}
        needs_all += [name for name, value in further.items() if isinstance(value, Tensor) and value.dim() > 1]
        if needs_all:
            raise PretrainedModelError(
                f"The model was called with {', '.join(needs_all)}, which may need all tokens on one rank, "
                f"but sequence_parallel_size is {self._group.size}. Leave it out, and generate text in one process."
            )
        positions = inputs.get("position_ids")
        if positions is not None and bool((positions.diff(dim=-1) != 1).any()):
            raise PretrainedModelError(
                "The position_ids start again inside a row, as those of packed samples or of padding on the left. "
                "Sequence parallelism counts on from the first: leave them out, or write sequence_parallel_size=1."
            )
        mask = inputs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise PretrainedModelError(
                "Sequence parallelism needs an attention_mask of 0 and 1 for each token, (N, T). Give the model that, "
                "or write sequence_parallel_size=1."
            )
        padded = self._length + -self._length % self._group.size
        if self._longest is not None and self._length <= self._longest < padded:
            raise PretrainedModelError(
                f"{self._length} tokens cannot be shared equally by sequence_parallel_size={self._group.size} ranks, "
                f"and {padded} are more than the {self._longest} positions of the model. Cut the samples to "
                f"{padded - self._group.size} tokens."
            )

    def _join(self, called: nn.Module, args: object, outputs: Any) -> Any:
        """Make the loss and the logits those of the whole sequence."""
        if self._outermost is not called:
            return None
        self._outermost = None
        if outputs is None:  # the call has failed
            return None
        if outputs.get("loss") is not None:
            outputs["loss"] = self._group.mean(outputs["loss"])
        if self._whole_logits:
            outputs["logits"] = self._group.whole(outputs["logits"], self._length)
        return outputs.to_tuple() if self._as_tuple else outputs


class _LayerAsConfigured:
    """An attention layer with its original configuration: flash attention chooses its kernel by the name in that."""

    def __init__(self, layer: nn.Module, config: PreTrainedConfig) -> None:
        self._layer = layer
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _check(model: PreTrainedModel) -> None:
    """Refuse models that would silently compute something else: they mix or count tokens outside causal attention."""
    reasons = [reason for reason, holds in _reasons(model, model.config.get_text_config()).items() if holds]
    reasons += [f"config.{name}=True needs all tokens on one rank" for name in recorded_outputs(model)]
    if reasons:
        raise PretrainedModelError(
            f"Sequence parallelism does not work with {type(model).__name__}: {'; '.join(reasons)}. Write "
            "sequence_parallel_size=1."
        )


def _reasons(model: PreTrainedModel, text: Any) -> dict[str, bool]:
    """Return each reason to refuse a model, and whether it holds for this one. `text` is its configuration."""
    kinds, attention, rotations = set(getattr(text, "layer_types", None) or ()), attention_name(model), _rotations(text)
    others, causal = sorted(kinds - _ATTENDING), is_causal_language_model(model)
    parameters = inspect.signature(model.forward).parameters
    takes_more = [*parameters.values()][-1].kind is inspect.Parameter.VAR_KEYWORD
    sees_ahead = getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision")
    return {
        "it is no causal language model of transformers": not causal,
        f"it has layers of another kind than attention ({', '.join(others) or 'they pass a state on'})": (
            bool(others) or passes_state_on(model)
        ),
        "its attention chooses tokens by an index": hasattr(text, "index_n_heads"),
        "its configuration says that tokens see those behind them": not getattr(text, "is_causal", True) or sees_ahead,
        "its configuration is another model's as well (give each one made by copy.deepcopy)": (
            attention.startswith(_NAME)
        ),
        f"its attention, {attention}, is not one that transformers lets others replace, as sdpa is in most models": (
            not has_registered_attention(model)
        ),
        "its loss_function is not that of transformers": causal and not has_usual_loss(model),
        "its forward is not that of transformers, and may compute a loss of its own": (
            causal and not has_usual_forward(model)
        ),
        "its forward takes no position_ids, or no further arguments for its loss": (
            not takes_more or "position_ids" not in parameters
        ),
        "its positions are not rotary, and may not be the places of the tokens": (
            not rotations and text.model_type not in _COUNT_FROM_ZERO
        ),
        "its attention counts the tokens that a rank sees (attn_temperature_tuning)": (
            getattr(text, "attn_temperature_tuning", False)
        ),
        "flash attention cannot attend in chunks": "flash" in attention and "chunked_attention" in kinds,
        f"its rotary positions ({', '.join(sorted(rotations))}) depend on how many tokens a rank sees": (
            bool(rotations & {"dynamic", "longrope"})
        ),
    }


def _rotations(text: Any) -> set[str]:
    """Return the kinds of rotary positions of a configuration; some have one for each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    by_layer = [each for each in parameters.values() if isinstance(each, Mapping)]
    return {str(each["rope_type"]) for each in (by_layer or [parameters]) if "rope_type" in each}
