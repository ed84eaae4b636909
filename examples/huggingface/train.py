"""Fine-tune a causal language model of transformers on a file of text.

It knows nothing of nodes. `python train.py --model FOLDER --text FILE` runs it on a laptop. In an Azure ML job with a
`distribution` block the same line trains on all processes of all nodes. `--strategy azureml_deepspeed_stage_3` and
others cut the model over them, and no process ever holds all of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoTokenizer

from azureml_strategy.huggingface import load_pretrained


class FineTuner(LightningModule):
    """What a user of transformers writes: the model, its loss, an optimizer."""

    def __init__(self, model: str, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.network is None:
            self.network = load_pretrained(self.hparams["model"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        loss = self.network(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.log("train/loss", loss, sync_dist=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


def read(path: Path, model: str, length: int) -> TensorDataset:
    """Return the text as rows of tokens, all of the same length."""
    tokens = AutoTokenizer.from_pretrained(model)(path.read_text())["input_ids"]
    rows = len(tokens) // length
    return TensorDataset(torch.tensor(tokens[: rows * length]).view(rows, length))


def main() -> None:
    """Train, and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder that save_pretrained wrote, or an id of the hub")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--strategy", default="ddp", help="a name of Lightning's, or one that begins with azureml_")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a step and process")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()

    module = FineTuner(options.model, options.learning_rate)
    rows = DataLoader(read(options.text, options.model, options.length), batch_size=options.batch_size, shuffle=True)
    trainer = Trainer(strategy=options.strategy, max_steps=options.steps, logger=False, enable_checkpointing=False)
    trainer.fit(module, rows)
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["train/loss"]
        print(f"{trainer.global_step} steps by {trainer.world_size} process(es), final loss {loss:.6f}")


if __name__ == "__main__":
    main()
