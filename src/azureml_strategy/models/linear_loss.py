"""The cross-entropy of a linear layer's logits, without the logits of a whole batch in memory.

A batch of 16,384 tokens has 3.3 GB of logits in float32 over GPT-2's vocabulary, and a loss makes three copies of them.
Here a chunk of tokens at a time has its logits, losses and gradients, and only the gradients are kept. torch 2.13's
`linear_cross_entropy` does the same, but in 16 bits it returns the sum of losses in 16 bits, and on a CPU it takes nine
times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from typing_extensions import override

from azureml_strategy.interfaces import IGNORED_LABEL

# Tensor cores take whole tiles of a matrix: an odd number of columns takes them twice as long. A CPU has none, and the
# copy of the matrix would cost.
TILE = 64
_TILED = {"cuda"}
# Tokens of a chunk. For each chunk the gradient of the matrix is added up: 12 bytes a weight, beside 6 operations a
# weight and token. A GPU has 200 operations in the time of a byte, a CPU ten.
_CHUNK = {"cpu": 512}
_LARGE_CHUNK = 4096
# Below this number of logits (64 MB in float32) their memory does not matter, and fewer operations are faster.
_FEW_LOGITS = 2**24


def autocasts(tensor: Tensor) -> bool:
    """Whether autocast is on for a tensor's device. There is none for the device `meta`."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def computing_type(weight: Tensor) -> torch.dtype:
    """Return the type in which a linear layer computes: autocast's where that is on."""
    casts = autocasts(weight) and weight.dtype is not torch.float64  # which autocast leaves alone
    return torch.get_autocast_dtype(weight.device.type) if casts else weight.dtype


def whole_tiles(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in the type to compute in; on a GPU with rows of zeros up to a multiple of `TILE`.

    Args:
        weight: `(classes, width)`.
        dtype: what `computing_type` returns.
    """
    missing = -weight.shape[0] % TILE if weight.device.type in _TILED else 0
    cast = weight.to(dtype)
    return functional.pad(cast, (0, 0, 0, missing)) if missing else cast


def takes_chunks(weight: Tensor, targets: Tensor) -> bool:
    """Whether `linear_cross_entropy` takes less memory than logits do, with gradients that are as exact.

    It keeps a gradient of the size of the matrix, which is more than the logits of few tokens. Gradients of float16
    must be multiplied by GradScaler's factor before they are rounded, and that is known only in the backward pass.
    """
    (classes, width), tokens = weight.shape, targets.numel()
    return tokens * classes > _FEW_LOGITS and tokens >= 2 * width and computing_type(weight) is not torch.float16


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of the cross-entropies of `hidden @ weight.T`, as `mean_cross_entropy` does of logits.

    Gradients are computed with the loss. The backward pass multiplies them, and may be repeated.

    Args:
        hidden: `(..., width)`.
        weight: `(classes, width)`.
        targets: int64 `(...)`, classes or `IGNORED_LABEL`.

    Returns:
        The mean over the targets that are not ignored, 0 if all are; in float32, or float64 if computed in it.

    Raises:
        ValueError: the targets have another shape than the hidden states.
        RuntimeError: a target is no class; or in a backward pass with `create_graph=True`.
    """
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"Hidden states {tuple(hidden.shape)} have no targets {tuple(targets.shape)}: the targets must have the "
            "same shape but for the last dimension."
        )
    dtype = computing_type(weight)
    wanted = [torch.is_grad_enabled() and each.requires_grad for each in (hidden, weight)]
    arguments = hidden.flatten(0, -2), weight, targets.flatten(), dtype
    if not any(wanted):
        return _losses_and_gradients(*arguments, False, False)[0]
    loss: Tensor = _LinearCrossEntropy.apply(*arguments, *wanted)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(Function):
    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *how: Any) -> Tensor:
        loss, of_hidden, of_weight = _losses_and_gradients(hidden, weight, *how)
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.types = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    @override
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # only with create_graph=True
            raise RuntimeError(
                "create_graph=True asks for derivatives of gradients, which the loss in chunks does not have. Compute "
                "it of the logits: with a LanguageModel module.pipeline_loss(module(inputs), targets), with a "
                "FineTuner by a loss function of your own, module.model.loss_function = lambda *args, **kwargs: "
                "ForCausalLMLoss(*args, **kwargs)."
            )
        saved: Any = ctx
        (of_hidden, of_weight), (hidden_type, weight_type) = saved.saved_tensors, saved.types
        # Cast first what was computed in 16 bits: the product is not rounded once more then.
        of_hidden = None if of_hidden is None else of_hidden.to(hidden_type) * gradients[0]
        of_weight = None if of_weight is None else (of_weight * gradients[0]).to(weight_type)
        return of_hidden, of_weight, None, None, None, None


def _losses_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, of_hidden: bool, of_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the mean loss and its gradients: that of `hidden` in `dtype`, that of `weight` in float32 at least."""
    matrix, states, classes = whole_tiles(weight, dtype), hidden.to(dtype), weight.shape[0]
    valid = (targets != IGNORED_LABEL).unsqueeze(1)
    count = valid.sum().clamp(min=1)
    precise = torch.promote_types(dtype, torch.float32)
    total = torch.zeros((), dtype=precise, device=hidden.device)
    hidden_gradient = torch.empty_like(states) if of_hidden else None
    weight_gradient = torch.zeros_like(matrix, dtype=precise) if of_weight else None
    chunks = -(-len(targets) // _CHUNK.get(hidden.device.type, _LARGE_CHUNK))
    places, shares = torch.where(valid, targets.unsqueeze(1), 0), valid / count.to(precise)
    columns = [states, places, shares] + ([] if hidden_gradient is None else [hidden_gradient])
    for part, place, share, *part_gradients in zip(*(column.chunk(chunks) for column in columns), strict=True):
        logits = part @ matrix.T
        logits[:, classes:] = -torch.inf  # no class, so without probability
        logs = logits.log_softmax(dim=1, dtype=precise)
        chosen = logs[:, :classes].gather(1, place)  # an error for targets that only the added rows have
        total -= torch.where(share > 0, chosen, 0).sum()
        if hidden_gradient is None and weight_gradient is None:
            continue
        slopes = logs.exp_().scatter_(1, place, chosen.expm1())  # probabilities, less 1 at the target
        slopes = torch.mul(slopes, share, out=logits)  # computed in float32, and rounded as it is written
        for part_gradient in part_gradients:
            torch.mm(slopes, matrix, out=part_gradient)
        if weight_gradient is not None:
            _add_product(weight_gradient, slopes.T, part)
    return total / count, hidden_gradient, None if weight_gradient is None else weight_gradient[:classes]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)  # without a matrix for the product
    else:
        total += left @ right
