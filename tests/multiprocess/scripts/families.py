"""Tiny models of transformers, rows for them, and a LightningModule that knows nothing of strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from azureml_strategy.huggingface.loading import load_pretrained
from azureml_strategy.huggingface.token_loss import tokens_per_loss

# Rows of an optimizer step over all ranks, and the batches that they come in.
ROWS, ACCUMULATED = 16, 2
VOCABULARY, LENGTH = 96, 12
FAMILIES = ("llama", "qwen3", "gemma3", "mistral", "gpt2", "bert")


def make_config(family: str) -> Any:
    """Small enough for a step of milliseconds; two heads of keys and values, to be cut in two."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if family == "llama":
        return transformers.LlamaConfig(**shape)
    if family == "qwen3":
        return transformers.Qwen3Config(**shape, head_dim=8, tie_word_embeddings=True)
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        return transformers.Gemma3TextConfig(**shape, head_dim=8, sliding_window=4, layer_types=kinds)
    if family == "mistral":
        return transformers.MistralConfig(**shape, sliding_window=6)
    if family == "gpt2":
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=32, **still)
    assert family == "bert"
    shape.pop("num_key_value_heads")
    return transformers.BertConfig(**shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def auto_class(family: str) -> Any:
    import transformers

    return transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM


def make_model(family: str) -> Any:
    torch.manual_seed(7)
    return auto_class(family).from_config(make_config(family))


def summed_loss(model: Any, batch: dict[str, Tensor], shifted: bool) -> Tensor:
    """Sum over the tokens of the batch, as transformers computes it before it divides by `num_items_in_batch`."""
    if shifted:
        loss: Tensor = model(**batch, num_items_in_batch=torch.ones(())).loss
        return loss
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def alone(
    family: str, steps: int, lora: bool = False, accumulated: int = ACCUMULATED, clip: float | None = 0.5
) -> list[float]:
    """Losses of one process with transformers and torch alone, on the batches of all ranks together."""
    model = make_model(family).train()
    model = add_lora(model) if lora else model
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-3)
    rows, losses = Rows(ROWS * steps), []
    order = DistributedSampler(rows, num_replicas=1, rank=0)  # as Lightning shuffles them
    for index, batch in enumerate(DataLoader(rows, batch_size=ROWS // accumulated, sampler=order)):
        shifted = family != "bert"
        labels = batch["labels"][:, 1:] if shifted else batch["labels"]
        loss = summed_loss(model, batch, shifted) / (labels != -100).sum()
        losses.append(loss.item())
        (loss / accumulated).backward()
        if index % accumulated == accumulated - 1:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def add_lora(model: Any) -> Any:
    import peft

    torch.manual_seed(8)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of unequal length, so that ranks have unequal numbers of tokens."""

    def __init__(self, rows: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=draw)
        self.lengths = torch.randint(3, LENGTH + 1, (rows,), generator=draw)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(LENGTH) < self.lengths[index]).long()
        tokens = self.tokens[index] * mask
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


class Module(LightningModule):
    """As a user of transformers writes it. Its losses are averages over the tokens of all ranks."""

    def __init__(
        self,
        family: str,
        steps: int,
        folder: Path | None = None,
        lora: bool = False,
        accumulated: int = ACCUMULATED,
    ) -> None:
        super().__init__()
        self.family, self.steps, self.folder, self.lora, self.accumulated = family, steps, folder, lora, accumulated
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            made_here = self.folder is None
            self.model = make_model(self.family) if made_here else load_pretrained(self.folder, auto_class(self.family))
            self.model = add_lora(self.model) if self.lora else self.model

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        tokens = tokens_per_loss(batch["labels"], self.trainer, shifted=self.family != "bert")
        return {**batch, "tokens": tokens.expand(len(batch["labels"]))}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens = batch["tokens"][0]
        inputs = {name: each for name, each in batch.items() if name != "tokens"}
        loss = summed_loss(self.model, inputs, self.family != "bert") / tokens
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=3e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        replicas = self.trainer.distributed_sampler_kwargs["num_replicas"]
        return DataLoader(Rows(ROWS * self.steps), batch_size=ROWS // self.accumulated // replicas)


class ManualModule(Module):
    """Steps by itself after each second batch, without clipping."""

    def __init__(self, family: str, steps: int, folder: Path | None = None) -> None:
        super().__init__(family, steps, folder)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx) / ACCUMULATED)
        if batch_idx % ACCUMULATED == ACCUMULATED - 1:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
