"""Calls that a GPU's library computes as a whole, where tensors without numbers would show their many small parts.

Attention is one kernel that keeps no scores (Dao et al. 2022, https://arxiv.org/abs/2205.14135). A layer of a recurrent
network is one call of cuDNN (https://docs.nvidia.com/deeplearning/cudnn, "RNN"), which launches all steps of the
sequence by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

# Forward: two products. Backward: five, because the scores are computed again (Dao 2023, https://arxiv.org/abs/2307.08691).
_ATTENTION_BACKWARD = 2.5
# Backward, each product has two: of the gradients of its inputs, and of its weights.
_RECURRENT_BACKWARD = 2.0
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""The layers that cuDNN computes, as torch calls them."""


class Records(Protocol):
    """What takes down an operator, see `operators.list_operators`."""

    silent: bool

    def add(
        self, name: str, flops: float, given: Sequence[Tensor], written: Sequence[Tensor], products: Sequence[Tensor]
    ) -> None:
        """Add an operator that reads `given` and writes `written`."""


@contextmanager
def fused_calls(recorder: Records) -> Iterator[None]:
    """Record attention and recurrent layers as the calls that they are on a GPU."""
    stock = functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return _Attention.apply(recorder, query, key, value)  # type: ignore[no-untyped-call]

    class Calls(TorchFunctionMode):
        """Sees calls by code that has imported the function by its name."""

        @override
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in RECURRENT:
                return _recurrent(recorder, func.__name__, args)
            return (attention if func is stock else func)(*args, **(kwargs or {}))

    # torch's own layers call it below a function that the mode has seen already.
    functional.scaled_dot_product_attention = attention
    try:
        with Calls():
            yield
    finally:
        functional.scaled_dot_product_attention = stock


class _Attention(torch.autograd.Function):
    """Attention without numbers: `(..., T, D)` queries, `(..., S, D)` keys and `(..., S, V)` values."""

    @staticmethod
    @override
    def forward(ctx: Any, recorder: Records, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.recorder = recorder
        ctx.save_for_backward(query, key, value)
        with _silence(recorder):
            output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        rows, columns = query.numel() // query.shape[-1], key.shape[-2]
        ctx.flops = 2.0 * rows * columns * (query.shape[-1] + value.shape[-1])
        recorder.add("attention", ctx.flops, [query, key, value], [output], ())
        return output

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        saved, recorder = ctx.saved_tensors, ctx.recorder
        with _silence(recorder):
            made = [torch.empty_like(each) for each in saved]
        recorder.add("attention_backward", _ATTENTION_BACKWARD * ctx.flops, [*saved, gradient, gradient], made, ())
        return None, *made


@dataclass(frozen=True)
class _Layers:
    """A recurrent network as torch calls it: its kind, and how many of its arguments are states and layers."""

    recorder: Records
    kind: str
    states: int
    layers: int
    directions: int


def _recurrent(recorder: Records, kind: str, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Take a call of `torch.lstm` or its like: inputs, the states, the weights; or rows, sizes of batches, the same."""
    packed = isinstance(args[3], (list, tuple))
    states, weights, _, layers, _, _, both_ways = args[2:9] if packed else args[1:8]
    states = tuple(states) if isinstance(states, (list, tuple)) else (states,)
    call = _Layers(recorder, kind, len(states), layers, 2 if both_ways else 1)
    return _Recurrent.apply(call, args[0], *states, *weights)  # type: ignore[no-any-return, no-untyped-call]


class _Recurrent(torch.autograd.Function):
    """Recurrent layers without numbers: each is one operator forward and one backward, in each direction.

    Every weight matrix meets every token once. Beside its outputs a layer writes its gates, which the backward pass
    reads. A recurrent matrix counts as read once: it stays in the GPU's caches over the steps of a sequence.
    """

    @staticmethod
    @override
    def forward(ctx: Any, call: _Layers, inputs: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        states, weights = others[: call.states], others[call.states :]
        rows, width = inputs.shape[:-1], states[0].shape[-1]
        of_one = len(weights) // (call.layers * call.directions)
        ctx.call, ctx.saved, given = call, [], inputs
        with _silence(call.recorder):
            ends = [torch.empty_like(each) for each in states]
        for layer in range(call.layers):
            with _silence(call.recorder):
                output = inputs.new_empty((*rows, call.directions * width))
            for direction in range(call.directions):
                place = of_one * (layer * call.directions + direction)
                own = weights[place : place + of_one]
                with _silence(call.recorder):
                    gates = inputs.new_empty((*rows, own[0].shape[0]))
                    written = inputs.new_empty((*rows, width))
                flops = 2.0 * rows.numel() * sum(each.numel() for each in own if each.dim() == 2)
                call.recorder.add(call.kind, flops, [given, *own], [written, gates], ())
                ctx.saved.append((flops, given, output, gates, own))
            given = output
        ctx.others = [inputs, *others]
        return output, *ends

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        recorder: Records = ctx.call.recorder
        for flops, given, output, gates, own in reversed(ctx.saved):
            with _silence(recorder):
                made = [torch.empty_like(each) for each in (given, *own)]
            name = f"{ctx.call.kind}_backward"
            recorder.add(name, _RECURRENT_BACKWARD * flops, [given, output, gates, gradient, *own], made, ())
            gradient = made[0]
        with _silence(recorder):
            return None, *(torch.empty_like(each) for each in ctx.others)


@contextmanager
def _silence(recorder: Records) -> Iterator[None]:
    """Make tensors that no kernel writes."""
    recorder.silent = True
    try:
        yield
    finally:
        recorder.silent = False
