"""Transformers models in a pipeline, and by themselves in one process: losses, weights, checkpoints, refusals."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from common import Losses, quiet_trainer, report
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BatchEncoding,
    PreTrainedModel,
)

from azureml_strategy.cli import main
from azureml_strategy.huggingface.loading import load_pretrained
from azureml_strategy.huggingface.token_loss import tokens_per_loss
from azureml_strategy.strategies import PipelineStrategy

TOKENS, LENGTH, PADDED = 128, 12, 4
SAMPLES, GLOBAL_BATCH, EPOCHS = 40, 8, 2  # 5 steps an epoch
CLIP = 0.5
FOLDER = Path(os.environ["RESULTS"]).parent
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "vocab_size": TOKENS, "pad_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "tie_word_embeddings": False},
    "qwen3": {**SMALL, "tie_word_embeddings": True},
    "gemma3_text": {
        **SMALL,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "mistral": {**SMALL, "sliding_window": 4},
    "gpt2": {**GPT2, **NO_DROPOUT},
}


def new_model(family: str, kind: Any = AutoModelForCausalLM, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(5)
    return kind.from_config(AutoConfig.for_model(family, **FAMILIES[family], **changes))


class Finetuned(LightningModule):
    """What a user of transformers writes."""

    def __init__(self, family: str, **changes: Any) -> None:
        super().__init__()
        self.family, self.changes = family, changes
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = new_model(self.family, **self.changes)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


class Loaded(Finetuned):
    """Reads the model from a folder."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = load_pretrained(FOLDER / "folder")


class InInit(Finetuned):
    """Makes the model at once, takes the loss from the logits, and keeps the mask from the model."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.model = new_model(family)

    def pipeline_batch(self, batch: Any) -> tuple[Any, Any]:
        return {"input_ids": batch["input_ids"]}, batch["labels"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class Weighted(Finetuned):
    """Micro-batches and replicas have other numbers of tokens: each loss is divided by the same number."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        tokens = tokens_per_loss(batch["labels"], self.trainer)
        return {**batch, "tokens": tokens.expand(len(batch["labels"]))}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch.pop("tokens")[0]
        return self.model(**batch, num_items_in_batch=tokens).loss


class OwnHead(Finetuned):
    """A model without a head, and two layers of the module's own."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = new_model(self.family, AutoModel)
            self.narrow, self.head = nn.Linear(32, 8), nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        return nn.functional.cross_entropy(self.head(self.narrow(states[:, 0])), batch["labels"][:, 0] % 3)


class Classifier(Finetuned):
    def __init__(self, family: str) -> None:
        super().__init__(family, kind=AutoModelForSequenceClassification, num_labels=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return self.model(**inputs, labels=batch["labels"][:, 0] % 3).loss


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.1)


def samples(count: int = SAMPLES, uneven: bool = False) -> list[dict[str, Tensor]]:
    """Every other pair of samples is padded, so that all micro-batches have as many tokens."""
    ids = torch.randint(1, TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, 1::2] = ids[:, 0::2]  # something to learn
    mask = torch.ones_like(ids)
    for index in range(count):
        if index % 4 > 1 or (uneven and index % 5 == 0):
            mask[index, LENGTH - PADDED :] = 0
    ids, labels = ids * mask, torch.where(mask.bool(), ids, -100)
    rows = zip(ids, mask, labels, strict=True)
    return [dict(zip(("input_ids", "attention_mask", "labels"), row, strict=True)) for row in rows]


def collate(rows: list[dict[str, Tensor]]) -> BatchEncoding:
    return BatchEncoding({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


def loader(size: int, data: list[dict[str, Tensor]], replicas: int = 1) -> DataLoader[Any]:
    """In the order of the data: Lightning's own sampler would shuffle it."""
    sampler = DistributedSampler(data, replicas, RANK % replicas, shuffle=False)  # type: ignore[arg-type]
    return DataLoader(data, size // replicas, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


def pipeline(
    name: str,
    module: LightningModule,
    resume: Path | None = None,
    uneven: bool = False,
    max_epochs: int = EPOCHS,
    precision: Any = "32-true",
    **strategy: Any,
) -> dict[str, Any]:
    watch, saver = Losses(), ModelCheckpoint(FOLDER / name, "{epoch}", save_top_k=-1)
    trainer = quiet_trainer(
        strategy=PipelineStrategy(**{"micro_batches": 2, **strategy}),
        max_epochs=max_epochs,
        callbacks=[watch, saver],
        enable_checkpointing=True,
        gradient_clip_val=CLIP,
        precision=precision,
        use_distributed_sampler=False,
        limit_val_batches=1.0 if name in FAMILIES else 0,
    )
    replicas = WORLD // trainer.strategy.num_stages
    loaders = loader(GLOBAL_BATCH, samples(uneven=uneven), replicas), loader(GLOBAL_BATCH, samples(16), replicas)
    trainer.fit(module, *loaders, ckpt_path=resume)
    held = sum(parameter.numel() for parameter in module.parameters())
    return {"losses": watch.losses, "val": float(trainer.callback_metrics.get("val/loss", 0)), "parameters": held}


def alone(module: Any, uneven: bool = False, epochs: int = EPOCHS) -> dict[str, Any]:
    """Train without Lightning and without us."""
    module.configure_model()
    module.log, module._trainer = lambda *args, **kwargs: None, quiet_trainer()
    optimizer, losses = adamw(module), []
    module.train()
    for _ in range(epochs):
        for batch in loader(GLOBAL_BATCH, samples(uneven=uneven)):
            loss = module.training_step(module.on_after_batch_transfer(batch, 0), 0)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    held = sum(parameter.numel() for parameter in module.parameters())
    val = evaluated(module.model) if type(module) is Finetuned else [0.0]
    return {"losses": losses, "val": sum(val) / len(val), "parameters": held}


def evaluated(model: PreTrainedModel) -> list[float]:
    model.eval()
    with torch.no_grad():
        return [model(**batch).loss.item() for batch in loader(GLOBAL_BATCH, samples(16))]


def consolidated(name: str) -> list[float]:
    """The validation losses of a stock model with the weights of a pipeline's checkpoint."""
    family, file = name, FOLDER / f"{name}.{RANK}.ckpt"
    assert main(["consolidate", str(FOLDER / name / "epoch=1.ckpt"), str(file)]) == 0
    weights = torch.load(file, weights_only=True)["state_dict"]
    assert all(each.startswith("model.") for each in weights)
    model = new_model(family)
    model.load_state_dict({each.removeprefix("model."): value for each, value in weights.items()})
    return evaluated(model)


VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "in_init": (lambda: InInit("mistral"), {}),
    "weighted": (lambda: Weighted("llama"), {"uneven": True}),
    "own_head": (lambda: OwnHead("qwen3"), {}),
    "classifier": (lambda: Classifier("llama"), {}),
}


def two_processes(*families: str) -> dict[str, Any]:
    """Families, each variant of a module, and a training that is saved, loaded, recomputed, rounded or refused."""
    results: dict[str, Any] = {}
    for family in families:
        results[family] = pipeline(family, Finetuned(family))
    for name, (make, arguments) in VARIANTS.items():
        results[name] = pipeline(name, make(), max_epochs=1, **arguments)
    results["recomputed"] = pipeline("recomputed", Finetuned("gemma3_text"), max_epochs=1, activation_checkpointing=1)
    results["bf16"] = pipeline("bf16", Finetuned("gemma3_text"), max_epochs=1, precision="bf16-mixed")
    results["again"] = pipeline("again", Finetuned("gpt2"), resume=FOLDER / "gpt2" / "epoch=0.ckpt")
    if RANK == 0:
        new_model("gemma3_text").save_pretrained(FOLDER / "folder", max_shard_size="20KB")
    torch.distributed.barrier()
    results["loaded"] = pipeline("loaded", Loaded("gemma3_text"), max_epochs=1)
    # each process trains every other model by itself
    for family in families[RANK::2]:
        results[f"{family} alone"] = alone(Finetuned(family))
    for name, (make, arguments) in list(VARIANTS.items())[RANK::2]:
        results[f"{name} alone"] = alone(make(), epochs=1, **arguments)
    for family in families[RANK::2]:
        results[f"{family} consolidated"] = consolidated(family)
    return {**results, "validated": validated_twice(), "refused": refused()}


def validated_twice() -> list[float]:
    """By a Trainer and by another, with a module that the first has cut."""
    module, found = Finetuned("gemma3_text"), []
    for _ in range(2):
        trainer = quiet_trainer(strategy=PipelineStrategy(micro_batches=2))
        found.append(trainer.validate(module, loader(GLOBAL_BATCH, samples(16)), verbose=False)[0]["val/loss"])
    return [*found, sum(evaluated(new_model("gemma3_text"))) / 2]


def refused() -> str:
    module = Finetuned("llama", output_hidden_states=True)
    try:
        pipeline("refused", module)
    except ValueError as error:
        return str(error)
    return "nothing"


def four_processes() -> dict[str, Any]:
    results = {
        "gemma3_text": pipeline("gemma3_text", Finetuned("gemma3_text")),
        "weighted": pipeline("weighted", Weighted("llama"), max_epochs=1, uneven=True),
    }
    if RANK == 0:
        results["gemma3_text alone"] = alone(Finetuned("gemma3_text"))
    if RANK == 1:
        results["weighted alone"] = alone(Weighted("llama"), epochs=1, uneven=True)
    return results


PARTS = {"two_processes": two_processes, "four_processes": four_processes}
results = PARTS[sys.argv[1]](*sys.argv[2:])
report(torch.distributed.get_rank(), **results)
torch.distributed.destroy_process_group()
