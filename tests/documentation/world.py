"""What a reader of the pages has at hand: a script, a model, folders of data, and names in Python."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Folders of the reader's machine that pages name; they are made in the folder in which a page runs.
PLACES = ("data", "models", "mnt")
SCRIPT = '''
"""A script of somebody who has never heard of this package."""
import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=1)
options = parser.parse_args()


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), options.lr)


trainer = Trainer(strategy="ddp", max_epochs=options.epochs, accelerator="cpu", log_every_n_steps=1)
trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(128, 4)), 4))
'''


def build(page: Path, folder: Path) -> None:
    """Make the files that the page's commands expect."""
    text = page.read_text()
    if "train.py" in text and page.stem != "first_steps":
        (folder / "train.py").write_text(SCRIPT)
    if "examples/" in text:
        shutil.copytree(ROOT / "examples", folder / "examples")
    if "/data/imagenet" in text or "/mnt/imagenet" in text:
        _images(folder)
    if "/data/books" in text:
        _books(folder)
    if "/data/answers.jsonl" in text:
        rows = [json.dumps({"prompt": f"{number}+1=", "completion": str(number + 1)}) for number in range(60)]
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / "answers.jsonl").write_text("\n".join(rows))
    if "/models/llama" in text:
        from tests.tiny_model import save_tiny_model

        save_tiny_model(folder / "models" / "llama")
    if "--log" in text or "nccl.log" in text:
        log = next((ROOT / "tests" / "samples").rglob("*.log"))
        for name in ("nccl.log", "user_logs/std_log.txt"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(log, folder / name)
    for prepare in _PREPARED.get(page.stem, ()):
        prepare(folder)


def _images(folder: Path) -> None:
    from tests.data.packing import class_folders

    for split in ("train", "val"):
        class_folders(folder / "data" / "imagenet" / split, {"cat": 4, "dog": 4})


def _books(folder: Path) -> None:
    (folder / "data" / "books").mkdir(parents=True)
    for number in range(3):
        text = f"It was the best of times, it was the worst of times, chapter {number}. " * 200
        (folder / "data" / "books" / f"{number}.txt").write_text(text)


def _tokenizer(folder: Path) -> None:
    from tests.tiny_model import make_tokenizer

    made = make_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    for place in (folder / "tokenizer.json", folder / "data" / "tokenizer.json"):
        made.backend_tokenizer.save(str(place))


def _cli_example(folder: Path) -> None:
    shutil.copytree(ROOT / "examples" / "lightning_cli", folder, dirs_exist_ok=True)


def _recipe(folder: Path) -> None:
    for name in ("my_recipe.yaml", "runs/mine.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("defaults: [gpt_ddp, _self_]\ntrainer: {max_steps: 2, limit_val_batches: 1}\n")


def _image(folder: Path) -> None:
    (folder / "docker").mkdir()
    (folder / "docker" / "Dockerfile").write_text("FROM mcr.microsoft.com/azureml/openmpi5.0-cuda12.6-ubuntu24.04\n")
    (folder / "conda.yaml").write_text("dependencies: [python=3.11, pip, {pip: [azureml-strategy]}]\n")


def _mount(folder: Path) -> None:
    """What the page packs lies on a mount afterwards."""
    (folder / "mnt").mkdir()
    (folder / "mnt" / "imagenet-256").symlink_to(folder / "data" / "imagenet-256")


_NET = """
import torch
from lightning.pytorch import LightningModule


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 2, 3)

    def forward(self, images):
        return self.layer(images.float()).mean((2, 3))
"""


def _checkpoint(folder: Path) -> None:
    """Of a module of the reader's, as a training leaves it."""
    import torch

    (folder / "my_parts.py").write_text(_NET)
    (folder / "requirements.txt").write_text("timm\n")
    record = {"class": "my_parts.Net", "input": {"shape": [3, 32, 32], "dtype": "uint8"}}
    weights = {"layer.weight": torch.zeros(2, 3, 3, 3), "layer.bias": torch.zeros(2)}
    path = folder / "outputs" / "run" / "checkpoints" / "epoch=2-step=66.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": weights, "epoch": 2, "global_step": 66, "azureml_strategy_module": record}, path)


_PREPARED = {
    "README": (_recipe,),
    "data": (_tokenizer,),
    "feed_the_gpus": (_mount,),
    "gpt": (_tokenizer,),
    "jobs": (_image,),
    "lightning_cli": (_cli_example,),
    "serving": (_checkpoint,),
    "submit": (_recipe,),
}


def names() -> dict[str, Any]:
    """Names that Python blocks use without an import, as a reader has them from the lines above in a script."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.cli import LightningCLI
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    from azureml_strategy import strategies
    from azureml_strategy.huggingface import load_pretrained, tokens_per_loss

    _train_briefly(Trainer)
    ours = {name: getattr(strategies, name) for name in strategies.__all__}
    known = {
        each.__name__: each
        for each in (LightningModule, Trainer, LightningCLI, DataLoader, IterableDataset, Path, partial)
    }
    known |= {
        "torch": torch,
        "itertools": itertools,
        "load_pretrained": load_pretrained,
        "tokens_per_loss": tokens_per_loss,
    }
    model, samples = _line(), TensorDataset(torch.randn(8, 4))
    made = {"model": model, "optimizer": model.configure_optimizers(), "data": DataLoader(samples, 4)}
    return ours | known | made | {"loader": DataLoader(samples, 4)}


def _line() -> Any:
    import torch
    from lightning.pytorch import LightningModule

    class Line(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Line()


def _train_briefly(trainer: Any) -> None:
    """Other defaults: one epoch on the CPU. What a page passes stays."""
    stock = trainer.__init__

    def init(self: Any, **arguments: Any) -> None:
        stock(self, **({"max_epochs": 1, "accelerator": "cpu"} | arguments))

    trainer.__init__ = init
