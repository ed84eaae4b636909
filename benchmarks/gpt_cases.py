"""GPT-125M by hand, with stock Lightning and with our recipe, and GPT-2 of transformers by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from fits import Case, fit, recipe, stock
from torch import Tensor, nn
from turns import DEVICE, Step, Turns

from azureml_strategy.data import count_tokens
from azureml_strategy.models import GPTConfig, LanguageModel, warmup_cosine
from azureml_strategy.models.optimizer import decay_groups
from azureml_strategy.tracking import ThroughputCallback

# conf/model/gpt_125m.yaml
GPT_125M = GPTConfig(
    *(50257, 1024, 12, 768, 12, 3072), norm="layernorm", positions="learned", mlp="gelu", tied=True, bias=True
)
SMALL = replace(GPT_125M, vocab_size=65, context=8, layers=2, width=8, heads=2, mlp_width=16)
CLIP = 1.0  # of the recipe's gradients
WARMUP_STEPS = 40  # of the learning rate

Batch = tuple[Tensor, Tensor]


def make_module(shape: GPTConfig, **settings: Any) -> LanguageModel:
    """The recipe's module; its weights are the same each time."""
    module = LanguageModel(shape, warmup_steps=WARMUP_STEPS, **settings)
    module.configure_model()
    return module


def make_batches(vocab_size: int, rows: int, length: int, count: int = 4) -> list[Batch]:
    """Random tokens on the device, and each next one."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (count, rows, length + 1), generator=random).to(DEVICE)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


class HandWritten:
    """A loop by hand: forward and backward, clipping, a fused AdamW, the recipe's schedule, and nothing else.

    Args:
        loss_of: of a batch; compiled or not.
        parameters: what AdamW takes.
        learning_rate: peak.
        total: steps of the training.
        precision: of autocast; None for none.
    """

    def __init__(
        self,
        loss_of: Callable[[Batch], Tensor],
        parameters: list[dict[str, Any]],
        learning_rate: float,
        total: int,
        precision: torch.dtype | None,
    ) -> None:
        self._loss_of, self._precision = loss_of, precision
        self._clipped = [parameter for group in parameters for parameter in group["params"]]
        self._adamw = torch.optim.AdamW(parameters, learning_rate, (0.9, 0.95), fused=True)
        schedule = partial(warmup_cosine, warmup_steps=WARMUP_STEPS, total_steps=total)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._adamw, schedule)

    def step(self, batch: Batch) -> Tensor:
        """Return the loss."""
        with torch.autocast(DEVICE.type, self._precision, enabled=self._precision is not None):
            loss = self._loss_of(batch)
        self._adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._clipped, CLIP)
        self._adamw.step()
        self._scheduler.step()
        return loss.detach()


def by_hand(module: LanguageModel, total: int, compiled: bool, precision: torch.dtype | None = None) -> HandWritten:
    """The loop of our model, with its own loss; compiled in one piece."""
    module.to(DEVICE)
    groups = decay_groups(module, module.hparams["weight_decay"])
    loss_of = compile_for_good(module.evaluation_loss) if compiled else module.evaluation_loss
    return HandWritten(loss_of, groups, module.hparams["learning_rate"], total, precision)


def compile_for_good(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function so that it stays as it is where an ablation replaces a part of the model's code."""
    return torch.compile(function, options={"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe})


def gpt2_by_hand(shape: GPTConfig, total: int, precision: torch.dtype) -> Step:
    """The compiled loop of transformers' GPT-2 of the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        **{"vocab_size": shape.vocab_size, "n_positions": shape.context, "n_embd": shape.width},
        **{"n_layer": shape.layers, "n_head": shape.heads, "use_cache": False},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    )
    model = GPT2LMHeadModel(config).to(DEVICE).train()

    def loss_of(batch: Batch) -> Tensor:
        loss: Tensor = model(input_ids=batch[0], labels=batch[1], shift_labels=batch[1]).loss
        return loss

    return HandWritten(torch.compile(loss_of), decay_groups(model, 0.1), 6e-4, total, precision).step


def without(name: str, instead: object) -> Callable[[], AbstractContextManager[object]]:
    """Replace a name of the model's code."""
    return partial(patch, f"azureml_strategy.models.{name}", instead)


_BLOCKS = recipe(compile="blocks")
# The recipe and its peers first. Each of the others is the recipe but for one thing.
CASES: dict[str, Case] = {
    "recipe": _BLOCKS,
    "lightning": stock(compiled=True),
    "compile=whole": recipe(compile="whole"),
    "compile=off": recipe(),
    "CUDA graphs": recipe(compile="blocks", compile_mode="reduce-overhead"),
    "vocabulary not padded": replace(_BLOCKS, within=without("linear_loss.TILE", 1)),
    "query, key and value apart": replace(_BLOCKS, within=without("gpt.called_plainly", lambda layer: False)),
    "AdamW not fused": replace(_BLOCKS, model={"fused": False}),
    "loss of all logits": replace(_BLOCKS, within=without("gpt.takes_chunks", lambda *_: False)),
}


def train(case: Case, shape: GPTConfig, turns: Turns) -> None:
    """One fit of a case, clipped and with the callbacks of the recipe."""
    module = make_module(shape, **case.model)
    throughput = ThroughputCallback(unit="tokens", batch_size=count_tokens)
    if case.compiled:
        for layer in module.layers:
            layer.compile()
    callbacks = [throughput] if case.is_ours else []
    fit(case, module, turns, callbacks=callbacks, gradient_clip_val=CLIP, log_every_n_steps=10)
