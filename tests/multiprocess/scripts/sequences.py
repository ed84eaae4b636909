"""What users' modules do with a model whose sequences are shared by two ranks, and the same under DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import MeanLosses, quiet_trainer
from families import ROWS, VOCABULARY, Module, Rows, make_model
from lightning.pytorch.strategies import Strategy
from model_parallel import SaveAfter
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.models.fine_tuning import FineTuner
from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLModelParallelStrategy

STEPS = 4


class Watched(Module):
    """Batches of an odd number of tokens; validation from logits."""

    def __init__(self, family: str = "llama") -> None:
        super().__init__(family, STEPS, accumulated=1)

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        odd = {name: tensor[:, :-1].contiguous() for name, tensor in batch.items()}
        return super().on_after_batch_transfer(odd, dataloader_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        inputs = {name: each for name, each in batch.items() if name != "tokens"}
        outputs = self.model(**inputs, num_items_in_batch=batch["tokens"][0])
        hits = outputs.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:]
        self.log_dict({"val_loss": outputs.loss, "hits": hits.float().mean()}, sync_dist=True)

    def val_dataloader(self) -> DataLoader[Any]:
        replicas = self.trainer.distributed_sampler_kwargs["num_replicas"]
        return DataLoader(Rows(ROWS), batch_size=ROWS // replicas)


class LossOfItsOwn(Watched):
    """Knows only the logits; they have gradients."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        found = functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        loss = found / batch["tokens"][0]
        self.log("loss", loss, sync_dist=True)
        return loss


class RandomBatches(Watched):
    """Each rank draws its first tokens by itself, and notes those that it trains on."""

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(10 * self.global_rank + self.global_step)
        batch["input_ids"][:, 0] = torch.randint(3, VOCABULARY, (len(batch["input_ids"]),), generator=draw)
        return super().on_after_batch_transfer(batch, dataloader_idx)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.first = batch["input_ids"][:, 0].tolist()
        return super().training_step(batch, batch_idx)


def fit(strategy: Strategy, module: Any, **arguments: Any) -> dict[str, Any]:
    trainer = quiet_trainer(strategy=strategy, max_steps=STEPS, gradient_clip_val=0.5, **arguments)
    trainer.fit(module)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"losses": module.losses, "metrics": metrics, "replicas": trainer.distributed_sampler_kwargs["num_replicas"]}


def shared(**arguments: Any) -> AzureMLModelParallelStrategy:
    return AzureMLModelParallelStrategy(sequence_parallel_size=2, **arguments)


class SummedLoss(LanguageModel):
    """Its loss of all tokens is not the mean of those of the parts."""

    def pipeline_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / len(outputs)


def gpt(
    strategy: Strategy,
    replicas: int,
    folder: Path | None = None,
    resume: bool = False,
    kind: type[LanguageModel] = LanguageModel,
    **shape: Any,
) -> Any:
    """The package's own, with fewer heads of keys and values; saved after its first epoch."""
    network = GPTConfig(
        vocab_size=VOCABULARY, context=11, layers=2, width=16, heads=4, kv_heads=2, mlp_width=32, **shape
    )
    module = kind(network, learning_rate=3e-3, warmup_steps=2)
    noted = MeanLosses()
    saving = [] if folder is None or resume else [SaveAfter(folder / "gpt.ckpt")]
    rows = Rows(2 * ROWS)
    # Full rows: a replica's average is over its own tokens, and DDP's is the average of those.
    pairs = [(rows.tokens[index, :-1], rows.tokens[index, 1:]) for index in range(len(rows))]
    loader = DataLoader(pairs, batch_size=ROWS // replicas)
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, gradient_clip_val=0.5, callbacks=[noted, *saving])
    trainer.fit(module, loader, loader, ckpt_path=folder / "gpt.ckpt" if folder is not None and resume else None)
    val_loss = float(trainer.callback_metrics["val/loss"])
    whole = trainer.predict(LogitsOf(module.network), DataLoader([pairs[0][0]] * 2))
    assert whole is not None
    return {
        "losses": noted.losses,
        "val_loss": val_loss,
        "logits": whole[0].flatten()[::7].tolist(),
    }


def fine_tuned(strategy: Strategy, replicas: int, folder: Path) -> dict[str, Any]:
    """The recipe's own module, on rows of unequal length with labels that are shifted already; an odd number in all."""
    rows, noted = Rows(2 * ROWS), MeanLosses()
    data = []
    for row in (rows[index] for index in range(len(rows))):
        labels = functional.pad(row.pop("labels"), (0, 1), value=-100)[1:]
        data.append({**row, "shift_labels": labels})
    tokens = sum(int((each["shift_labels"] != -100).sum()) for each in data)
    assert tokens % 2 == 1, "two ranks have unequal numbers"
    trainer = quiet_trainer(strategy=strategy, gradient_clip_val=0.5, callbacks=[noted])
    loader = DataLoader(data, batch_size=ROWS // replicas)
    trainer.fit(FineTuner(str(folder / "llama"), learning_rate=3e-3), loader, loader)
    return {"losses": noted.losses, "val_loss": float(trainer.callback_metrics["val/loss"])}


class LogitsOf(LanguageModel):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found: Tensor = self(batch)
        return found


REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "generate": lambda model, tokens: model.generate(tokens, max_new_tokens=2, do_sample=False),
    "body": lambda model, tokens: model.model(input_ids=tokens),
    "packed": lambda model, tokens: model(input_ids=tokens, position_ids=torch.arange(12).expand(2, -1) % 6),
    "hidden": lambda model, tokens: model(input_ids=tokens, output_hidden_states=True),
    "mask": lambda model, tokens: model(input_ids=tokens, attention_mask=torch.ones(2, 1, 12, 12)),
    "unknown": lambda model, tokens: model(input_ids=tokens, weights=torch.ones(2, 12)),
}


class Refused(Module):
    def __init__(self) -> None:
        super().__init__("llama", 1, accumulated=1)
        self.words: dict[str, str] = {}

    def on_train_start(self) -> None:
        tokens = torch.arange(3, 27).view(2, 12)
        for name, call in REFUSED.items():
            try:
                call(self.model, tokens)
            except ValueError as error:
                self.words[name] = str(error)


def restored(module: Watched) -> dict[str, Any]:
    """A model of this process's own has its attention and its hooks back when the training has ended."""
    hooks = [
        hook for each in module.model.modules() for hook in each._forward_pre_hooks.values() if "Shared" in repr(hook)
    ]
    return {"attention": module.model.config._attn_implementation, "hooks": len(hooks)}


def refused() -> dict[str, str]:
    """What is refused before the first step."""
    words = {}

    class Dynamic(Watched):
        def configure_model(self) -> None:
            if self.model is None:
                self.model = make_model("llama")
                self.model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}

    cases = {"bert": Watched("bert"), "rotary": Dynamic(), "plain": Plain()}
    for name, module in cases.items():
        try:
            fit(shared(), module)
        except ValueError as error:
            words[name] = str(error)
    return words


class Plain(Watched):
    def configure_model(self) -> None:
        self.model = torch.nn.Linear(2, 2)


def details(folder: Path, more: bool) -> dict[str, Any]:
    watched, random = Watched(), RandomBatches()
    result = {
        "ddp": fit(AzureMLDDPStrategy(), Watched()),
        "labels": fit(shared(), watched),
        "logits": fit(shared(), LossOfItsOwn("gpt2")),
        "logits_ddp": fit(AzureMLDDPStrategy(), LossOfItsOwn("gpt2")),
        "gpt": gpt(shared(), 1, folder),
        "gpt_ddp": gpt(AzureMLDDPStrategy(), 2),
        "gpt_resumed": gpt(shared(), 1, folder, resume=True),
        "gpt_summed": gpt(shared(), 1, kind=SummedLoss),
        "gpt_summed_ddp": gpt(AzureMLDDPStrategy(), 2, kind=SummedLoss),
        "restored": restored(watched),
        "refused": refused(),
    }
    if more:
        result |= more_details(folder)
    fit(shared(), random)
    result["random"] = random.first
    module = Refused()
    quiet_trainer(strategy=shared(), max_steps=1).fit(module)
    return {**result, "calls": module.words}


def more_details(folder: Path) -> dict[str, Any]:
    return {
        "recomputed": fit(shared(activation_checkpointing=True), Watched()),
        "bf16": fit(shared(), Watched(), precision="bf16-mixed"),
        "gpt_learned": gpt(shared(), 1, positions="learned", checkpoint_activations=True),
        "gpt_learned_ddp": gpt(AzureMLDDPStrategy(), 2, positions="learned"),
        "fine_tuned": fine_tuned(shared(), 1, folder),
        "fine_tuned_ddp": fine_tuned(AzureMLDDPStrategy(), 2, folder),
    }
