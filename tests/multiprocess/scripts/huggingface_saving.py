"""A tiny Llama, whole and with adapters, under each strategy: trained, resumed, and written for from_pretrained."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Losses, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from azureml_strategy.checkpoint import JobCheckpoint, checkpoint_to_resume
from azureml_strategy.checkpoint.manifest import manifest_path
from azureml_strategy.huggingface import load_pretrained
from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLDeepSpeedStrategy, AzureMLModelParallelStrategy

FOLDER = Path(os.environ["RESULTS"]).parent
TOKENS, LENGTH, SEQUENCES = 128, 9, 24

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": AzureMLDDPStrategy,
    "stage_2": AzureMLDeepSpeedStrategy,
    "stage_3": lambda: AzureMLDeepSpeedStrategy(stage=3),
    "model_parallel": AzureMLModelParallelStrategy,
    "sequence": lambda: AzureMLModelParallelStrategy(sequence_parallel_size=2),
}


class FineTuning(LightningModule):
    """What a user writes. Nothing of it knows of the strategy."""

    def __init__(self, base: Path, adapters: bool, load: Callable[[Path], Any]) -> None:
        super().__init__()
        self.base, self.adapters, self.load = base, adapters, load
        self.logits = torch.empty(0)

    def configure_model(self) -> None:
        self.model: Any = self.load(self.base)
        if self.adapters:
            self.model = get_peft_model(self.model, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.logits = self.model(input_ids=batch).logits.detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)


def sequences() -> Tensor:
    return torch.randint(0, TOKENS, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))


def train(name: str, adapters: bool, base: Path, resume: Path | None = None) -> tuple[list[float], Tensor, Path]:
    """Train an epoch in a folder of its own, then validate. All is seeded, but for what a checkpoint restores.

    Returns:
        The losses, what the model says of the first sequence at the end, and the folder.
    """
    seed_everything(0, verbose=False)  # the order of samples follows from it
    if resume is not None:
        torch.manual_seed(7)
    stock = name in ("ddp", "stage_3") and int(os.environ["WORLD_SIZE"]) > 1
    losses, module = (
        Losses(),
        FineTuning(base, adapters, LlamaForCausalLM.from_pretrained if stock else load_pretrained),
    )
    folder = FOLDER / f"{name}_{adapters}_{resume is not None}"
    saving = JobCheckpoint(folder, "{step}", every_n_train_steps=3, keep_last=9, hugging_face=resume is None)
    trainer = quiet_trainer(strategy=STRATEGIES[name](), callbacks=[losses, saving], enable_checkpointing=True)
    data = DataLoader(list(sequences()), batch_size=2), DataLoader(list(sequences()[:1]))
    trainer.fit(module, *data, ckpt_path=resume)
    if trainer.is_global_zero:
        torch.save(module.logits, folder / "logits.pt")
    return losses.losses, module.logits, folder


class Killed(Callback):
    """Ends rank 1 as the kernel does when memory is short, at a step without a checkpoint after one with it."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        complete = manifest_path(self.checkpoint).exists()
        if trainer.global_rank == 1 and trainer.global_step % 3 == 2 and complete:
            os.kill(os.getpid(), signal.SIGKILL)


def train_on(name: str, folder: Path, kill: bool) -> dict[str, Any]:
    """Train four epochs from the newest checkpoint in a folder, if there is one."""
    seed_everything(0, verbose=False)
    module, losses = FineTuning(FOLDER / "base", name != "sequence", load_pretrained), Losses()
    saving = JobCheckpoint(folder, "{step}", every_n_train_steps=3, keep_last=9)
    callbacks = [losses, saving, *([Killed(folder / "step=3.ckpt")] if kill else [])]
    arguments = {"max_epochs": 4, "enable_checkpointing": True, "limit_val_batches": 1}
    trainer = quiet_trainer(strategy=STRATEGIES[name](), callbacks=callbacks, **arguments)
    data = DataLoader(list(sequences()), batch_size=2), DataLoader(list(sequences()[:1]))
    trainer.fit(module, *data, ckpt_path=checkpoint_to_resume("auto", folder))
    return {"losses": losses.losses, "logits": module.logits.flatten().tolist()}


def error_of(name: str, base: Path, resume: Path) -> str:
    try:
        train(name, True, base, resume)
    except Exception as error:
        return str(error)
    return ""


def main() -> None:
    results: dict[str, Any] = {}
    if sys.argv[1] in ("straight", "killed"):
        results = {name: train_on(name, FOLDER / f"{sys.argv[1]}_{name}", False) for name in sys.argv[2:]}
        report(dist.get_rank(), **results)
        return
    if sys.argv[1] == "kill":
        train_on(sys.argv[2], FOLDER / f"killed_{sys.argv[2]}", True)
    for name in sys.argv[1:]:
        whole, _, _ = train(name, False, FOLDER / "base")
        straight, expected, folder = train(name, True, FOLDER / "base")
        resumed, logits, _ = train(name, True, FOLDER / "base", folder / "step=3.ckpt")
        results[name] = {
            "whole": whole,
            "straight": straight,
            "resumed": resumed,
            "logits": torch.equal(logits, expected),
        }
        if name in ("ddp", "stage_3"):  # one loads its weights before it is set up, the other after
            results[name]["refused"] = error_of(name, FOLDER / "other", folder / "step=3.ckpt")
    report(dist.get_rank(), **results)


if __name__ == "__main__":
    main()
