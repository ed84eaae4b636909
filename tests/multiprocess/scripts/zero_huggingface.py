"""Models built in configure_model under ZeRO on two ranks, and the same by transformers alone on the joined batch."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import quiet_trainer, report
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from azureml_strategy.huggingface.loading import load_pretrained
from azureml_strategy.strategies import AzureMLDeepSpeedStrategy

TOKENS, LENGTH, STEPS, BATCH = 128, 12, 6, 8
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SAVED = Path(os.environ["RESULTS"]).parent / f"saved_{RANK}"
SEQUENCES = torch.randint(TOKENS, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
SMALL: dict[str, Any] = {"vocab_size": TOKENS, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, pad_token_id=0)
LLAMA = LlamaConfig(**SMALL, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
MIXTRAL = MixtralConfig(
    **{**SMALL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    num_key_value_heads=2,
    num_local_experts=4,
)


class NanoGPT(nn.Module):
    """No model of transformers; its constructor sets weights as nanoGPT's does."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(TOKENS, 32), nn.Linear(32, TOKENS, bias=False)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0, batch_first=True)
        self.wte.weight = self.head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1)
        logits = self.head(self.layer(self.wte(input_ids[:, :-1]), mask))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


class Built(LightningModule):
    """A model that is built in configure_model. It notes the loss of each step."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make
        self.losses: list[float] = []

    def configure_model(self) -> None:
        torch.manual_seed(3)
        self.model = self.make().train()

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch)["loss"]
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def alone(make: Callable[[], nn.Module]) -> list[float]:
    """The oracle: a loop of torch and transformers over the joined batches, without Lightning and DeepSpeed."""
    torch.manual_seed(3)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in SEQUENCES.split(BATCH):
        loss = model(input_ids=batch, labels=batch)["loss"]
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def fit(make: Callable[[], nn.Module], **arguments: Any) -> list[float]:
    module = Built(make)
    trainer = quiet_trainer(
        strategy=AzureMLDeepSpeedStrategy(**{"stage": 3, **arguments}), use_distributed_sampler=False
    )
    trainer.fit(module, DataLoader(SEQUENCES, batch_size=BATCH // WORLD, sampler=Own()))
    return module.losses


class Own(torch.utils.data.Sampler[int]):
    """Each joined batch's own part of this rank."""

    def __iter__(self) -> Any:
        return iter(torch.arange(len(SEQUENCES)).view(-1, BATCH)[:, RANK::WORLD].flatten().tolist())

    def __len__(self) -> int:
        return len(SEQUENCES) // WORLD


def load(config: Any, model_class: Any = AutoModelForCausalLM) -> Any:
    return load_pretrained(SAVED / config.model_type, model_class)


def from_pretrained(config: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(SAVED / config.model_type)


def save() -> None:
    """Other weights than those of the seed that the models are built with."""
    torch.manual_seed(7)
    LlamaForCausalLM(LLAMA).save_pretrained(SAVED / "llama", max_shard_size="40KB")
    GPT2LMHeadModel(GPT2).save_pretrained(SAVED / "gpt2")
    MixtralForCausalLM(MIXTRAL).save_pretrained(SAVED / "mixtral")


# Of the strategy; of all else, stage 3.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "gpt2_stage_2": {"stage": 2},
    "gpt2_offload": {"offload_optimizer": True, "offload_parameters": True},
}
# What ZeRO builds, and what the oracle builds.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    **dict.fromkeys(("gpt2", *ARGUMENTS), (lambda: GPT2LMHeadModel(GPT2), lambda: GPT2LMHeadModel(GPT2))),
    "llama_from_config": (lambda: AutoModelForCausalLM.from_config(LLAMA), lambda: LlamaForCausalLM(LLAMA)),
    "llama_from_pretrained": (lambda: from_pretrained(LLAMA), lambda: from_pretrained(LLAMA)),
    "nanogpt": (NanoGPT, NanoGPT),
    "gpt2_loaded": (lambda: load(GPT2), lambda: from_pretrained(GPT2)),
    "llama_loaded": (lambda: load(LLAMA), lambda: from_pretrained(LLAMA)),
    "mixtral_loaded": (lambda: load(MIXTRAL), lambda: from_pretrained(MIXTRAL)),
}


def failure(make: Callable[[], nn.Module]) -> str:
    """What a run that fails in configure_model says."""
    try:
        fit(make)
    except (RuntimeError, StopIteration) as error:
        assert not is_deepspeed_zero3_enabled()
        return str(error)
    return "nothing"


def new_head() -> dict[str, Any]:
    """A model whose head the folder lacks."""
    import deepspeed

    seen: dict[str, Any] = {}

    def make() -> nn.Module:
        torch.manual_seed(RANK)
        model = load(GPT2, GPT2ForSequenceClassification)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            seen["head"] = model.score.weight.flatten().tolist()
            seen["embedding"] = model.transformer.wte.weight.flatten().tolist()
        raise StopIteration("not to be trained")

    assert failure(make) == "not to be trained"
    seen["expected"] = GPT2LMHeadModel.from_pretrained(SAVED / "gpt2").transformer.wte.weight.flatten().tolist()
    return seen


if __name__ == "__main__":
    save()
    names = sys.argv[1:] or CASES
    oracle = {name: alone(CASES[name][1]) for name in names} if RANK == 0 else {}
    losses = {name: fit(CASES[name][0], **ARGUMENTS.get(name, {})) for name in names}
    other_shape = failure(lambda: load_pretrained(SAVED / "llama", intermediate_size=96))
    heads, after = new_head(), is_deepspeed_zero3_enabled()
    report(RANK, oracle=oracle, losses=losses, after=after, new_head=heads, other_shape=other_shape)
